"""Estimate the memory of a training step by running it on fake tensors.

The whole step (both passes, losses, backward) runs on torch's fake tensors, which have shapes and lifetimes
but no data, and every allocation and release is counted. So the estimate follows the code: it includes what
autograd keeps, what recomputation saves, and when gradients appear. It does not include what a library's
kernels allocate inside an operation, nor the allocator's overhead.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
from dgemma.model.config import ModelConfig
from dgemma.model.lora import attach, lora_parameters
from dgemma.model.transformer import Transformer
from dgemma.training.data.canvases import Packing, TrainingBatch
from dgemma.training.objective import token_losses
from dgemma.training.optimizer import TrainedWeights, choose_trained, state_bytes
from dgemma.training.recipe import Recipe
from dgemma.training.setup import DTYPES, EXPERT_BLOCK, training_execution


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes at the peak of a step."""

    weights: int  # all weights that the forward reads
    trained: int  # master weights and optimizer moments of the trained weights
    activations: int  # at their peak, gradients included

    @property
    def fixed(self) -> int:
        """What neither the size of a batch nor recomputing changes."""
        return self.weights + self.trained

    @property
    def total(self) -> int:
        return self.fixed + self.activations


@dataclass(frozen=True, kw_only=True)
class CheaperSetting:
    """A recipe that needs less memory. changes: what to type, such as "micro_batch=1"."""

    changes: tuple[str, ...]
    has_4bit_base: bool
    estimate: MemoryEstimate


def estimate_step(config: ModelConfig, recipe: Recipe) -> MemoryEstimate:
    """The peak of a step of this recipe on a model of this geometry.

    The worst case: every example has `max_length` tokens, all of them supervised. What other objectives than
    "denoise" need beside it is not counted: a teacher, several states of a canvas, paths.
    """
    with FakeTensorMode():
        return _estimate(config, recipe)


def with_4bit_base(estimate: MemoryEstimate, config: ModelConfig, recipe: Recipe) -> MemoryEstimate:
    """The same step on a frozen base that `dgemma quantize --format int4` wrote.

    Products dequantize one matrix at a time (of expert weights one expert's), through float32: the largest
    is counted with the activations. The vocabulary is dequantized some rows at a time.
    """
    plan, size = quantization_config_for("int4", config), DTYPES[recipe.precision].itemsize
    saved = largest = 0
    for spec in tensor_specs(config):
        quantized = plan.nbytes(spec)
        if quantized is not None:
            saved += spec.size * size - quantized
            if spec.part != "embedding":
                dequantized = spec.size // (spec.shape[0] if len(spec.shape) == 3 else 1)
                largest = max(largest, dequantized * (4 + size))
    return replace(estimate, weights=estimate.weights - saved, activations=estimate.activations + largest)


def cheaper_setting(
    config: ModelConfig, recipe: Recipe, estimate: MemoryEstimate, limit: int
) -> CheaperSetting | None:
    """The first of these settings, each added to the ones before, whose step fits into `limit` bytes.

    micro_batch=1 and recompute=true change the time of a step only; a 4-bit base, of an adapter, comes last.
    estimate: of `recipe`. Weights and optimizer are the same in all settings, so a step is estimated again,
    which takes seconds, only where it can fit.
    """
    settings = _with_fewer_activations(recipe)
    if estimate.fixed <= limit:
        for changes, changed in settings:
            estimate = estimate_step(config, changed)
            if estimate.total <= limit:
                return CheaperSetting(changes=changes, has_4bit_base=False, estimate=estimate)
    was_tried = estimate.fixed <= limit or not settings
    packed = with_4bit_base(estimate, config, recipe)
    if recipe.train != "lora" or packed.fixed > limit:
        return None
    changes, changed = settings[-1] if settings else ((), recipe)
    if not was_tried:
        packed = with_4bit_base(estimate_step(config, changed), config, changed)
    if packed.total > limit:
        return None
    if recipe.compile:
        changes += ("compile=false",)  # products of a quantized base are not traced
    return CheaperSetting(changes=changes, has_4bit_base=True, estimate=packed)


def _with_fewer_activations(recipe: Recipe) -> list[tuple[tuple[str, ...], Recipe]]:
    """The changes and the recipe with them; each has those before it."""
    found: list[tuple[tuple[str, ...], Recipe]] = []
    changes: tuple[str, ...] = ()
    if (recipe.micro_batch or recipe.batch) > 1:
        recipe, changes = replace(recipe, micro_batch=1), (*changes, "micro_batch=1")
        found.append((changes, recipe))
    if not recipe.recompute:
        recipe, changes = replace(recipe, recompute=True), (*changes, "recompute=true")
        found.append((changes, recipe))
    return found


def _estimate(config: ModelConfig, recipe: Recipe) -> MemoryEstimate:
    execution = training_execution(recipe, config, torch.device(recipe.device))
    if recipe.precision == "fp32" and execution.expert_block is None:
        # torch has no fake grouped product in float32; blocks need about the same memory.
        execution = replace(execution, expert_block=EXPERT_BLOCK)
    stack = Transformer(config, dtype=DTYPES[recipe.precision], device="cpu", execution=execution)
    weights = sum(t.nbytes for t in (*stack.parameters(), *stack.buffers()))
    if recipe.train == "lora":
        stack = attach(stack, recipe.lora, seed=0, dtype=torch.float32)
        trained = TrainedWeights(lora_parameters(stack))
        weights += sum(p.nbytes for p in trained.parameters.values())
    else:
        trained = TrainedWeights(choose_trained(stack, recipe.freeze))
    own = sum(m.nbytes for n, m in trained.masters.items() if m is not trained.parameters[n])
    batch = _worst_batch(config, recipe)

    def step() -> None:
        losses = token_losses(stack, batch)
        ((losses.diffusion * batch.weights).mean() + losses.encoder.mean()).backward()
        trained.collect_gradients()

    return MemoryEstimate(
        weights=weights,
        trained=own + state_bytes(trained, recipe.optimizer),
        activations=peak_bytes(step),
    )


def _worst_batch(config: ModelConfig, recipe: Recipe) -> TrainingBatch:
    examples = recipe.micro_batch or recipe.batch
    rows = examples * recipe.noise.canvases
    length = recipe.data.max_length
    canvas = recipe.noise.canvas_len or config.canvas_len

    def ids(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape)

    packed_length = recipe.data.packed_length
    packing = None
    shape = (examples, length)
    if packed_length is not None:
        shape = (-(-examples // (packed_length // length)), packed_length)
        packing = Packing(positions=ids(*shape), segments=ids(*shape), context_places=ids(rows, length))
    return TrainingBatch(
        tokens=ids(*shape),
        starts=ids(rows),
        clean=ids(rows, canvas),
        noisy=ids(rows, canvas),
        weights=numbers(rows, canvas),
        noise=numbers(rows),
        guessed=(torch.arange(rows),) * recipe.noise.guesses,
        encoder_places=ids(examples * (length - 1)),
        encoder_targets=ids(examples * (length - 1)),
        encoder_weights=numbers(examples * (length - 1)),
        packing=packing,
    )


def peak_bytes(run: Callable[[], Any]) -> int:
    """The peak of the bytes of tensors allocated by `run`; earlier tensors do not count."""
    counter = _LiveBytes()
    # Cyclic garbage counts until it is collected: a collection at any other time would change the estimate.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with counter:
            run()
    finally:
        if was_enabled:
            gc.enable()
    return counter.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages from their allocation until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # A view or an in-place operation allocates no storage.
            if isinstance(tensor, Tensor) and _key(tensor) not in inputs:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed(_: Any) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
