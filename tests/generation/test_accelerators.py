"""A whole step without an accelerator: fake CUDA, one graph, one number read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.diffusion.noise import Use, place_at, random_tokens
from dgemma.diffusion.step import CanvasState, Sampler, open_canvas
from dgemma.generation import loop
from dgemma.generation.loop import refine
from dgemma.language_model import LanguageModel
from dgemma.model.cache import KVCache
from dgemma.model.context import Context
from dgemma.model.stack import Stack
from dgemma.params import GenerationParams
from fake_cuda import DEVICE, FakeCuda
from oracle import CASES, make_oracle, make_ours, tokens

CASE = CASES[5]  # every expert for every token: bf16 rounding cannot flip a routing choice
PARAMS, SAMPLER = GenerationParams(), Sampler()


@dataclass
class Doors:
    """The stack behind a fixed context, without the handle's checks of its arguments."""

    stack: Stack
    context: Context

    @property
    def config(self) -> Any:
        return self.stack.config

    def denoise(self, canvas: Tensor, cache: Any, soft: Tensor | None = None) -> Tensor:
        return self.stack.denoise(canvas, self.context, soft)


@torch.no_grad()
def test_a_step_runs_under_fake_cuda() -> None:
    config = make_ours(make_oracle(CASE)).config
    with FakeCuda():
        lm = LanguageModel(Stack(config, dtype=torch.bfloat16, device=DEVICE))
        cache = KVCache(config, 3, dtype=torch.bfloat16, device=DEVICE)
        place = place_at([1, 2, 3], [0] * 3, [0] * 3, DEVICE)
        state = open_canvas(random_tokens(place, Use.OPEN, config.canvas_len, config.vocab_size))
        state, reading = refine(lm, state, cache, None, place, SAMPLER, PARAMS)
        state, _ = refine(lm, state, cache, reading.soft, place, SAMPLER, PARAMS)
        for tensor in (state.canvas, state.guess, state.settled, state.steps):
            assert tensor.device.type == "cuda"


@torch.no_grad()
def test_a_step_compiles_to_one_graph() -> None:
    lm = make_ours(make_oracle(CASE), dtype=torch.bfloat16)
    cache = lm.new_cache(2)
    lm.encode(tokens(CASE, 2, 20, seed=1), cache)
    doors = Doors(lm.stack, cache.context())
    place = place_at([1, 2], [0, 0], [0, 0], torch.device("cpu"))
    start = open_canvas(tokens(CASE, 2, 8, seed=2))

    def two_steps(state: CanvasState) -> CanvasState:
        state, reading = refine(doors, state, cache, None, place, SAMPLER, PARAMS)
        return refine(doors, state, cache, reading.soft, place, SAMPLER, PARAMS)[0]

    torch._dynamo.reset()
    compiled = torch.compile(two_steps, fullgraph=True, backend="aot_eager")
    plain, fused = two_steps(start), compiled(start)
    for name in ("canvas", "guess", "unchanged", "steps", "settled"):
        assert torch.equal(getattr(plain, name), getattr(fused, name)), name


class CountReadBacks(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_reads_nothing_back_and_the_loop_one_number_per_step() -> None:
    lm = make_ours(make_oracle(CASE), dtype=torch.bfloat16)
    seen: list[int] = []
    mode = CountReadBacks()

    def watched(model: Any, *args: Any) -> Any:
        doors = Doors(lm.stack, args[1].context())  # the handle looks at tokens that lie on a CPU
        before = mode.count
        result = refine(doors, *args)
        seen.append(mode.count - before)
        return result

    with mock.patch.object(loop, "refine", watched), mode:
        answer = lm.generate([5, 6], max_tokens=8, max_denoising_steps=6, ignore_end=True, seed=1)
    assert seen == [0] * answer.forwards
    with mock.patch.object(loop, "refine", watched), mode:
        before = mode.count
        longer = lm.generate([5, 6], max_tokens=8, max_denoising_steps=12, ignore_end=True, seed=1)
        read_back = mode.count - before
    # The rest is the handle's look at the prompt, and does not grow with the steps.
    assert longer.forwards == 12
    assert read_back - longer.forwards <= 8


@torch.no_grad()
def test_counting_read_backs_can_fail() -> None:
    mode = CountReadBacks()
    with mode:
        float(torch.ones(3).sum())
        torch.ones(3).nonzero()
    assert mode.count == 2
