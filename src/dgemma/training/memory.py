"""What a training step will need, found by running it without memory.

The whole step (both doors, losses, backward) runs on torch's fake tensors, which have shapes and lifetimes
but no numbers, and every allocation and release is counted. So the estimate follows the code: it
knows what autograd keeps, what recomputing saves, and when gradients appear. It does not know what a
library's kernels allocate inside an operation, nor an allocator's waste.
"""

from __future__ import annotations

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
from dgemma.checkpoint.quantized.plan import plan_of
from dgemma.model.config import ModelConfig
from dgemma.model.lora import attach, lora_parameters
from dgemma.model.stack import Stack
from dgemma.training.canvases import Batch
from dgemma.training.objective import token_losses
from dgemma.training.optimizer import state_bytes
from dgemma.training.recipe import Recipe
from dgemma.training.setup import DTYPES, EXPERT_BLOCK, training_execution
from dgemma.training.weights import TrainedWeights, choose_trained


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes at the peak of a step."""

    weights: int  # what the forward reads, trained or not
    trained: int  # masters and moments of what is trained, beyond its place among the weights
    activations: int  # at their peak, gradients included

    @property
    def total(self) -> int:
        return self.weights + self.trained + self.activations


def estimate_step(config: ModelConfig, recipe: Recipe) -> MemoryEstimate:
    """The peak of a step of this recipe on a model of this geometry.

    The worst case: every example has `max_length` tokens, all of them supervised.
    """
    with FakeTensorMode():
        return _estimate(config, recipe)


def with_4bit_base(estimate: MemoryEstimate, config: ModelConfig, recipe: Recipe) -> MemoryEstimate:
    """The same step on a frozen base that `dgemma quantize --format int4` wrote.

    Products decode one matrix at a time, of a bank one expert's, by way of float32: the largest is counted
    with the activations. The vocabulary is decoded some rows at a time.
    """
    plan, size = plan_of("int4", config), DTYPES[recipe.precision].itemsize
    saved = largest = 0
    for spec in tensor_specs(config):
        coded = plan.nbytes(spec)
        if coded is not None:
            saved += spec.size * size - coded
            if spec.part != "embedding":
                decoded = spec.size // (spec.shape[0] if len(spec.shape) == 3 else 1)
                largest = max(largest, decoded * (4 + size))
    return replace(estimate, weights=estimate.weights - saved, activations=estimate.activations + largest)


def _estimate(config: ModelConfig, recipe: Recipe) -> MemoryEstimate:
    execution = training_execution(recipe, config, torch.device(recipe.device))
    if recipe.precision == "fp32" and execution.expert_block is None:
        # torch cannot tell the shape of its grouped product in float32; blocks take about the same.
        execution = replace(execution, expert_block=EXPERT_BLOCK)
    stack = Stack(config, dtype=DTYPES[recipe.precision], device="cpu", execution=execution)
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


def _worst_batch(config: ModelConfig, recipe: Recipe) -> Batch:
    examples = recipe.micro_batch or recipe.batch
    rows = examples * recipe.noise.canvases
    length = recipe.data.max_length
    canvas = recipe.noise.canvas_len or config.canvas_len

    def ids(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape)

    return Batch(
        tokens=ids(examples, length),
        starts=ids(rows),
        clean=ids(rows, canvas),
        noisy=ids(rows, canvas),
        weights=numbers(rows, canvas),
        noise=numbers(rows),
        guessed=(torch.arange(rows),) * recipe.noise.guesses,
        encoder_places=ids(examples * (length - 1)),
        encoder_targets=ids(examples * (length - 1)),
        encoder_weights=numbers(examples * (length - 1)),
    )


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that tensors made by `run` hold at once; what existed before does not count."""
    counter = _LiveBytes()
    with counter:
        run()
    return counter.peak


class _LiveBytes(TorchDispatchMode):
    """Counts storages from the operation that makes them until nobody holds them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # A view, or an operation in place, makes no storage.
            if isinstance(tensor, Tensor) and _key(tensor) not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
