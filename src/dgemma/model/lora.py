"""LoRA adapters: low-rank additions to the weights of a transformer.

An adapted weight computes `W x + (alpha / rank) up (down x)`; `down` is LoRA's A and `up` its B. The base may
be plain or quantized (QLoRA). An adapted transformer is a new module tree over the same tensors: several
adapters of one base exist at once and share its memory, and the base works without them.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.errors import InputError, suggestion
from dgemma.model.linear import ALL, ExpertLinear, Linear, PlainExpertLinear, PlainLinear, select_experts
from dgemma.model.transformer import Transformer

PARTS = ("attention", "mlp", "experts", "self_conditioning", "router")
Module = TypeVar("Module", bound=nn.Module)
Change = Callable[[str, nn.Module], nn.Module | None]
_GROUPED_ALIGNMENT = 16  # bytes: torch's grouped product needs every row of its operands aligned so


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Which weights a new adapter adapts, and with which ranks.

    rank, alpha: of every linear; the addition is scaled by alpha / rank.
    expert_rank, expert_alpha: the same for each expert. There are many experts, so their rank is lower; the
      defaults scale both by 2.
    targets: parts of the transformer out of `PARTS`. The router is not adapted unless named. A part that is
      not named, or whose rank is 0, is not adapted.
    """

    rank: int = 16
    expert_rank: int = 4
    alpha: float = 32.0
    expert_alpha: float = 8.0
    targets: tuple[str, ...] = PARTS[:4]

    def __post_init__(self) -> None:
        for name in ("rank", "expert_rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InputError.about(name, f"is {value!r}; it must be a whole number of at least 0.")
        for name in ("alpha", "expert_alpha"):
            value = getattr(self, name)
            good = isinstance(value, int | float) and not isinstance(value, bool)
            if not good or not 0 < value < math.inf:
                raise InputError.about(name, f"is {value!r}; it must be a number above 0.")
        if not isinstance(self.targets, tuple):
            raise InputError.about(
                "targets", f"is {self.targets!r}; it must be a tuple out of {', '.join(PARTS)}."
            )
        for part in self.targets:
            if part == "embedding":
                raise InputError.about(
                    "targets",
                    "has 'embedding'; it is read, mixed and tied to the vocabulary, so it takes no adapter. "
                    f"Choose out of {', '.join(PARTS)}.",
                )
            if part not in PARTS:
                raise InputError.about(
                    "targets",
                    f"has {part!r}, which is no part of the transformer{suggestion(str(part), PARTS)} "
                    f"Parts: {', '.join(PARTS)}.",
                )
        if not any(self.rank_of(part) for part in self.targets):
            raise InputError.about(
                "targets",
                f"is {self.targets!r} with rank {self.rank} and expert_rank {self.expert_rank}, "
                "which adapts nothing; name a part whose rank is above 0.",
            )

    def rank_of(self, part: str) -> int:
        return self.expert_rank if part == "experts" else self.rank

    def alpha_of(self, part: str) -> float:
        return self.expert_alpha if part == "experts" else self.alpha


def attach(
    transformer: Transformer,
    settings: LoraSettings,
    *,
    seed: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Transformer:
    """The transformer with a new adapter, which changes nothing until it is trained.

    Only the factors require gradients. The factors of a weight depend on `seed` and its path, not on what
    else is adapted. dtype, device: of the factors; None for the model's. Products always run in the model's
    dtype.
    """
    added = {}
    for path, weight in _weights(transformer).items():
        part = _part(path)
        rank = settings.rank_of(part) if part in settings.targets else 0
        if rank:
            alpha = settings.alpha_of(part)
            on_meta = (device or _device(weight)).type == "meta"  # only shapes: the 26 B is counted this way
            added[path] = _new_factors(weight, rank, alpha, f"{seed}:{path}", on_meta=on_meta)
    return adapted(transformer, added, dtype=dtype, device=device)


def adapted(
    transformer: Transformer,
    added: Mapping[str, LoraFactors],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    trainable: bool = True,
) -> Transformer:
    """The transformer with the LoRA factors `added`, keyed by the path of their weight."""
    if has_adapter(transformer):
        raise InputError("this transformer has an adapter already; detach it first, or attach to its base.")

    def wrap(path: str, module: nn.Module) -> nn.Module | None:
        if path not in added:
            return None
        factors = added[path].to(device or _device(module), dtype or transformer.embedding.dtype)
        if isinstance(module, ExpertLinear):
            return LoraExpertLinear(_frozen_copy(module), factors, trainable=trainable)
        assert isinstance(module, Linear), path
        return LoraLinear(_frozen_copy(module), factors, trainable=trainable)

    return _frozen_copy(transformer, wrap)


def adapted_weights(transformer: Transformer) -> dict[str, LoraLinear | LoraExpertLinear]:
    """The adapted weights, by path."""
    return {p: w for p, w in _weights(transformer).items() if isinstance(w, LoraLinear | LoraExpertLinear)}


def has_adapter(transformer: Transformer) -> bool:
    return bool(adapted_weights(transformer))


def lora_parameters(transformer: Transformer) -> dict[str, nn.Parameter]:
    """The factors by name, such as `layers.0.attention.query.down`."""
    found = adapted_weights(transformer).items()
    return {f"{path}.{name}": getattr(weight, name) for path, weight in found for name in ("down", "up")}


def detach(transformer: Transformer) -> Transformer:
    """The base alone, over the same tensors."""
    return _frozen_copy(
        transformer, lambda _, m: m.base if isinstance(m, LoraLinear | LoraExpertLinear) else None
    )


def merged(transformer: Transformer) -> Transformer:
    """A transformer of plain weights with the adapter merged in; weights that are not adapted are shared.

    `transformer` itself is unchanged, so that its `detach` still gives the exact base.
    """

    def merge(path: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, LoraLinear | LoraExpertLinear):
            return None
        if not isinstance(module.base, PlainLinear | PlainExpertLinear):
            raise InputError(
                f"{path} is a {type(module.base).__name__}; only plain weights can be merged. Load the "
                "base unquantized and merge there."
            )
        result: PlainLinear | PlainExpertLinear = _frozen_copy(module.base)
        added = LoraFactors(down=module.down, up=module.up, alpha=module.alpha)
        result.weight = nn.Parameter(merged_weight(module.base.weight, added), requires_grad=False)
        return result

    return _frozen_copy(transformer, merge)


def _weights(transformer: Transformer) -> dict[str, Linear | ExpertLinear]:
    """Every linear by path; of an adapted one the LoRA wrapper, not its base."""
    found = {p: m for p, m in transformer.named_modules() if isinstance(m, Linear | ExpertLinear)}
    return {path: weight for path, weight in found.items() if path.rpartition(".")[0] not in found}


def _part(path: str) -> str:
    names = path.split(".")
    return names[2] if names[0] == "layers" else names[0]


def _frozen_copy(module: Module, change: Change = lambda path, module: None, path: str = "") -> Module:
    """The same module over the same tensors, none of which requires gradients.

    Where `change` returns a module for a path, that module replaces the original.
    """
    result = copy.copy(module)
    result._parameters = {name: _frozen(tensor) for name, tensor in module._parameters.items()}
    result._buffers = dict(module._buffers)
    result._modules = {}
    for name, child in module._modules.items():
        if child is None:
            result._modules[name] = None
            continue
        at = f"{path}.{name}" if path else name
        changed = change(at, child)
        result._modules[name] = _frozen_copy(child, change, at) if changed is None else changed
    return result


def _frozen(tensor: nn.Parameter | None) -> nn.Parameter | None:
    if tensor is None or not tensor.requires_grad:
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)  # another parameter over the same memory


def _new_factors(
    weight: Linear | ExpertLinear, rank: int, alpha: float, name: str, *, on_meta: bool
) -> LoraFactors:
    experts = (weight.num_experts,) if isinstance(weight, ExpertLinear) else ()
    down_shape, up_shape = (*experts, rank, weight.in_features), (*experts, weight.out_features, rank)
    if on_meta:
        return LoraFactors(
            down=torch.empty(down_shape, device="meta"), up=torch.empty(up_shape, device="meta"), alpha=alpha
        )
    # Seeded by name, so that no factor depends on the order, and made on the CPU, so that none depends
    # on the device.
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    down = torch.randn(down_shape, generator=torch.Generator().manual_seed(seed))
    return LoraFactors(down=down * weight.in_features**-0.5, up=torch.zeros(up_shape), alpha=alpha)


def _device(weight: nn.Module) -> torch.device:
    return next(chain(weight.parameters(), weight.buffers())).device


@dataclass(frozen=True, kw_only=True)
class LoraFactors:
    """The LoRA factors of one weight. For expert weights both have the experts as first dimension."""

    down: Tensor  # [rank, in], LoRA's A
    up: Tensor  # [out, rank], LoRA's B
    alpha: float

    def to(self, device: torch.device, dtype: torch.dtype) -> LoraFactors:
        return LoraFactors(down=self.down.to(device, dtype), up=self.up.to(device, dtype), alpha=self.alpha)


class LoraLinear(Linear):
    """A linear plus a low-rank product. The factors are cast to the dtype of their input."""

    def __init__(self, base: Linear, added: LoraFactors, *, trainable: bool = True) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.alpha = added.down.shape[-2], added.alpha
        self.scale = self.alpha / self.rank
        self.down = nn.Parameter(added.down, requires_grad=trainable)
        self.up = nn.Parameter(added.up, requires_grad=trainable)

    def multiply(self, x: Tensor, rows: slice = ALL) -> Tensor:
        low = F.linear(x, self.down.to(x.dtype)) * self.scale
        return self.base.multiply(x, rows) + F.linear(low, self.up[rows].to(x.dtype))

    def gather_rows(self, ids: Tensor) -> Tensor:
        rows = self.base.gather_rows(ids)
        up = F.embedding(ids, self.up).to(rows.dtype) * self.scale
        return rows + up @ self.down.to(rows.dtype)

    def mix_rows(self, shares: Tensor, rows: slice = ALL) -> Tensor:
        low = shares @ self.up[rows].to(shares.dtype) * self.scale
        return self.base.mix_rows(shares, rows) + low @ self.down.to(shares.dtype)

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.down.nbytes + self.up.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


class LoraExpertLinear(ExpertLinear):
    """Expert weights plus a low-rank product for every expert."""

    def __init__(self, base: ExpertLinear, added: LoraFactors, *, trainable: bool = True) -> None:
        super().__init__()
        self.base = base
        self.num_experts = base.num_experts
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.alpha = added.down.shape[-2], added.alpha
        self.scale = self.alpha / self.rank
        self.down = nn.Parameter(added.down, requires_grad=trainable)
        self.up = nn.Parameter(added.up, requires_grad=trainable)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        low = F.linear(x, self.down[expert].to(x.dtype)) * self.scale
        return self.base.multiply(expert, x) + F.linear(low, self.up[expert].to(x.dtype))

    def multiply_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        down, up = self.down.to(x.dtype), self.up.to(x.dtype)
        # Pad the rank with zeros up to the alignment: half a row at rank 4 in bf16, nothing at rank 8.
        missing = -self.rank % (_GROUPED_ALIGNMENT // x.element_size())
        if missing:
            down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))
        low = F.grouped_mm(x, down.transpose(-2, -1), offs=ends) * self.scale
        return self.base.multiply_grouped(x, ends) + F.grouped_mm(low, up.transpose(-2, -1), offs=ends)

    def multiply_blocks(self, x: Tensor, expert_of_block: Tensor) -> Tensor:
        down = select_experts(self.down.to(x.dtype), expert_of_block)
        up = select_experts(self.up.to(x.dtype), expert_of_block)
        low = torch.bmm(x, down.transpose(1, 2)) * self.scale
        return self.base.multiply_blocks(x, expert_of_block) + torch.bmm(low, up.transpose(1, 2))

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.down.nbytes + self.up.nbytes


@torch.no_grad()
def merged_weight(weight: Tensor, added: LoraFactors) -> Tensor:
    """`W + (alpha / rank) up down`, added in fp32 and rounded once to W's dtype."""
    if weight.ndim == 3:  # expert by expert: all experts in fp32 are gigabytes
        result = torch.empty_like(weight)
        for expert, matrix in enumerate(weight):
            result[expert] = merged_weight(
                matrix, LoraFactors(down=added.down[expert], up=added.up[expert], alpha=added.alpha)
            )
        return result
    product = added.up.float() @ added.down.float()
    return (weight.float() + added.alpha / added.down.shape[0] * product).to(weight.dtype)
