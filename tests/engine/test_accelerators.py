"""A whole step without an accelerator: fake CUDA, one graph, one number read back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.engine.model_runner import sample_step
from dgemma.model.kv_cache import AttentionContext, KVCache
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from dgemma.sampling.rng import NoiseKey, NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import CanvasState, Sampler, open_canvas
from fake_cuda import DEVICE, FakeCuda
from oracle import FULL, SLIDING, Case, make_oracle, make_ours, tokens
from sizes import GRAPH_BACKEND

# Every expert for every token: bf16 rounding cannot flip a routing choice. One layer of each kind.
CASE = Case(
    "two layers", {"top_k_experts": 8, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}, seed=6
)
PARAMS, SAMPLER = GenerationParams(), Sampler()


def steps_of(
    stack: Transformer, context: AttentionContext, place: NoiseKey, state: CanvasState
) -> CanvasState:
    """Two steps: the second one behind the soft embedding of the first."""
    soft = None
    for _ in range(2):
        hidden = stack.denoise(state.canvas, context, soft)
        state, reading = sample_step(stack, state, hidden, place, SAMPLER, PARAMS)
        soft = reading.soft
    return state


@torch.no_grad()
def test_a_step_runs_under_fake_cuda() -> None:
    config = make_ours(make_oracle(CASE)).config
    with FakeCuda():
        stack = Transformer(config, dtype=torch.bfloat16, device=DEVICE)
        cache = KVCache(config, 3, dtype=torch.bfloat16, device=DEVICE)
        place = noise_key([1, 2, 3], [0] * 3, [0] * 3, DEVICE)
        state = open_canvas(random_tokens(place, NoiseStream.OPEN, config.canvas_len, config.vocab_size))
        state = steps_of(stack, cache.context(), place, state)
        for tensor in (state.canvas, state.argmax, state.settled, state.steps):
            assert tensor.device.type == "cuda"


@torch.no_grad()
def test_a_step_compiles_to_one_graph() -> None:
    lm = make_ours(make_oracle(CASE), dtype=torch.bfloat16)
    cache = lm.new_cache(2)
    lm.encode(tokens(CASE, 2, 20, seed=1), cache)
    place = noise_key([1, 2], [0, 0], [0, 0], torch.device("cpu"))
    start = open_canvas(tokens(CASE, 2, 8, seed=2))

    def two_steps(state: CanvasState) -> CanvasState:
        return steps_of(lm.transformer, cache.context(), place, state)

    torch._dynamo.reset()
    compiled = torch.compile(two_steps, fullgraph=True, backend=GRAPH_BACKEND)
    plain, fused = two_steps(start), compiled(start)
    for name in ("canvas", "argmax", "unchanged", "steps", "settled"):
        assert torch.equal(getattr(plain, name), getattr(fused, name)), name


class CountReadBacks(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_reads_nothing_back_and_the_engine_one_thing_per_step() -> None:
    lm = make_ours(make_oracle(CASE), dtype=torch.bfloat16)
    mode = CountReadBacks()
    seen: list[int] = []

    def watched(*args: Any) -> Any:
        before = mode.count
        result = sample_step(*args)
        seen.append(mode.count - before)
        return result

    counts = []
    for steps in (6, 12):
        with mock.patch("dgemma.engine.model_runner.sample_step", watched), mode:
            before = mode.count
            answer = lm.generate([5, 6], max_tokens=8, max_denoising_steps=steps, ignore_end=True, seed=1)
            counts.append(mode.count - before)
        assert answer.forwards == steps
    assert seen == [0] * 18
    # `tolist` is not seen here; what is seen must not grow with the steps.
    assert counts[0] == counts[1]


@torch.no_grad()
def test_counting_read_backs_can_fail() -> None:
    mode = CountReadBacks()
    with mode:
        float(torch.ones(3).sum())
        torch.ones(3).nonzero()
    assert mode.count == 2
