"""The part of a model that one of several processes holds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from dgemma.errors import InputError
from dgemma.model.config import LayerShape, ModelConfig

# A rank's tokens begin at a multiple of this, which the vocabulary scan needs (`vocab_scan.SPLIT`).
VOCAB_UNIT = 4096


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that rank `rank` of `size` holds."""

    config: ModelConfig  # of the whole model
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        config, size = self.config, self.size
        if size < 1:
            raise InputError.about("tensor_parallel", f"is {size}; it must be at least 1.")
        heads = {layer.num_kv_heads for layer in config.layers}
        if config.num_heads % size or any(count % size and size % count for count in heads):
            raise InputError.about(
                "tensor_parallel",
                f"is {size}; {config.num_heads} heads with {sorted(heads)} key/value heads cannot be divided "
                f"evenly by it. Possible here: {', '.join(map(str, self._sizes()))}.",
            )
        if size > min(config.num_experts, config.mlp_size):
            raise InputError.about(
                "tensor_parallel", f"is {size}; this model has only {config.num_experts} experts to divide."
            )

    def _sizes(self) -> list[int]:
        config = self.config
        return [
            size
            for size in range(1, min(config.num_heads, config.num_experts, config.mlp_size) + 1)
            if config.num_heads % size == 0
            and all(x.num_kv_heads % size == 0 or size % x.num_kv_heads == 0 for x in config.layers)
        ]

    @cached_property
    def heads(self) -> slice:
        return self._even(self.config.num_heads)

    def kv_heads(self, layer: LayerShape) -> slice:
        """Past one rank per head, several ranks hold the same head."""
        if layer.num_kv_heads >= self.size:
            return self._even(layer.num_kv_heads)
        head = self.rank * layer.num_kv_heads // self.size
        return slice(head, head + 1)

    @cached_property
    def mlp(self) -> slice:
        return self._even(self.config.mlp_size)

    @cached_property
    def experts(self) -> slice:
        return self._even(self.config.num_experts)

    @property
    def vocab(self) -> slice:
        return self.vocabs[self.rank]

    @cached_property
    def vocabs(self) -> tuple[slice, ...]:
        """The tokens of each rank; all of them, where there are too few to divide."""
        units, size = -(-self.config.vocab_size // VOCAB_UNIT), self.size
        if units < size:
            return (slice(0, self.config.vocab_size),) * size
        ends = [min(units * rank // size * VOCAB_UNIT, self.config.vocab_size) for rank in range(size + 1)]
        return tuple(slice(begin, end) for begin, end in pairwise(ends))

    @property
    def divides_vocab(self) -> bool:
        return self.vocab != slice(0, self.config.vocab_size)

    @cached_property
    def attention(self) -> ModelConfig:
        """The geometry with this rank's heads alone: of its projections, and of its KV cache."""

        def layer(shape: LayerShape) -> LayerShape:
            return replace(shape, num_kv_heads=_length(self.kv_heads(shape)))

        return replace(
            self.config,
            num_heads=_length(self.heads),
            layers=tuple(map(layer, self.config.layers)),
        )

    def _even(self, count: int) -> slice:
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length
