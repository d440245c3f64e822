"""A model's figures: the same work on both sides, and every figure over what it claims to count.

Times come from clocks that the tests move, so that no assertion depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import dgemma
from dgemma.bench import model_bench, reference
from dgemma.bench.model_bench import BenchPlan, run_bench
from dgemma.bench.reference import ReferenceTimes, TimedReference, load_reference
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.events import Answer, Commit, Finish, FinishReason, Timings
from dgemma.model.transformer import DenoiseInput, EncodeInput, Transformer

CANVAS = PRESETS["tiny"].config.canvas_len
PLAN = BenchPlan(prompt_tokens=12, canvases=3, steps=5, causal_tokens=4, rounds=1)
PROMPT = list(range(100, 112))
FIGURES = {"seconds_per_step", "seconds_per_commit", "seconds_per_causal_token", "tokens_per_second"}


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint so sure of its words that its canvases settle in a few steps."""
    path = tmp_path_factory.mktemp("sure")
    write_random(path / "random", PRESETS["tiny"].config, dtype="F32", seed=1)
    lm = dgemma.load(path / "random")
    embedding = lm.transformer.get_parameter("embedding.weight")
    direction = torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedding *= 0.05
        embedding[7], embedding[8] = 100 * direction, -100 * direction  # one of the two always wins
    lm.save(path / "sure")
    return path / "sure"


@pytest.fixture(scope="module")
def lm(sure: Path) -> dgemma.LanguageModel:
    return dgemma.load(sure)


@pytest.fixture(scope="module")
def oracle(sure: Path) -> Any:
    return load_reference(sure, torch.float32)


def counted(module: Any, door: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The shapes of tokens that go through a door."""
    calls: list[tuple[Any, ...]] = []
    run = getattr(module, door)

    def counting(*args: Any, **kwargs: Any) -> Any:
        tokens = [*args, kwargs.get("input_ids"), kwargs.get("decoder_input_ids")]
        calls.append(next(tuple(t.shape) for t in tokens if isinstance(t, torch.Tensor)))
        return run(*args, **kwargs)

    monkeypatch.setattr(module, door, counting)
    return calls


def our_parts(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[int], object] = lambda tokens: None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tokens that our stack reads, and the canvases it refines; `note` is told how many each has."""
    encoded: list[torch.Tensor] = []
    denoised: list[torch.Tensor] = []
    forward = Transformer.forward

    def counting(stack: Transformer, parts: list[EncodeInput | DenoiseInput]) -> Any:
        for part in parts:
            tokens = part.tokens if isinstance(part, EncodeInput) else part.canvas
            (encoded if isinstance(part, EncodeInput) else denoised).append(tokens)
            note(tokens.shape[1])
        return forward(stack, parts)

    monkeypatch.setattr(Transformer, "forward", counting)
    return encoded, denoised


def test_our_canvases_take_exactly_k_steps_although_they_would_settle(
    lm: dgemma.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = lm.generate(PROMPT, max_tokens=3 * CANVAS, max_denoising_steps=5, ignore_end=True, seed=0)
    assert max(free.steps) < 5
    encoded, denoised = our_parts(monkeypatch)
    answer = model_bench._dgemma_diffuse(lm, PROMPT, PLAN)
    assert answer.steps == (5, 5, 5)
    assert [tuple(canvas.shape) for canvas in denoised] == [(1, CANVAS)] * 15
    # The prompt, then a commit between canvases.
    assert [tuple(tokens.shape) for tokens in encoded] == [(1, 12), (1, CANVAS), (1, CANVAS)]
    assert len(answer.tokens) == 3 * CANVAS


def test_the_references_canvases_take_exactly_k_steps_although_they_would_settle(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoised = counted(oracle.model.decoder, "forward", monkeypatch)
    encoded = counted(oracle.model.encoder, "forward", monkeypatch)
    prompt = torch.tensor([PROMPT])
    oracle.generate(prompt, max_new_tokens=3 * CANVAS, max_denoising_steps=5, eos_token_id=[2048])
    assert len(denoised) < 15
    denoised.clear(), encoded.clear()
    times = TimedReference(oracle).diffuse(prompt, canvases=3, steps=5)
    assert denoised == [(1, CANVAS)] * 15
    assert encoded == [(1, 12), (1, CANVAS), (1, CANVAS)]
    assert times.num_tokens == 3 * CANVAS


@pytest.mark.parametrize("steps", [1, 2])
def test_few_steps_are_k_steps_too(
    steps: int, lm: dgemma.LanguageModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoised = counted(oracle.model.decoder, "forward", monkeypatch)
    TimedReference(oracle).diffuse(torch.tensor([PROMPT]), canvases=2, steps=steps)
    assert len(denoised) == 2 * steps
    plan = BenchPlan(canvases=2, steps=steps)
    assert model_bench._dgemma_diffuse(lm, PROMPT, plan).steps == (steps, steps)


def test_an_end_token_ends_neither_side(
    lm: dgemma.LanguageModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle.generation_config, "eos_token_id", [7, 8])  # all that this model writes
    monkeypatch.setitem(lm.__dict__, "generation_defaults", dgemma.GenerationParams.make(end_tokens=(7, 8)))
    assert len(lm.generate(PROMPT, max_tokens=2 * CANVAS, seed=0).tokens) < 2 * CANVAS
    plan = BenchPlan(canvases=2, steps=3)
    assert len(model_bench._dgemma_diffuse(lm, PROMPT, plan).tokens) == 2 * CANVAS
    assert TimedReference(oracle).diffuse(torch.tensor([PROMPT]), 2, 3).num_tokens == 2 * CANVAS


def test_a_causal_token_is_one_forward_on_both_sides(
    lm: dgemma.LanguageModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    read, _ = our_parts(monkeypatch, clock.by_tokens)
    seconds = model_bench._dgemma_causal(lm, PROMPT, 4)
    assert seconds == 1.0, "the prompt's forward counts, or a token's does not"
    assert [tuple(tokens.shape) for tokens in read] == [(1, 12), *[(1, 1)] * 4]
    encoded = counted(oracle.model.encoder, "forward", monkeypatch)
    clock.ticks_for(oracle.model.encoder, "forward", monkeypatch, seconds=lambda n: 1.0 if n == 1 else 50.0)
    assert TimedReference(oracle).causal(torch.tensor([PROMPT]), 4) == 1.0
    assert encoded == [(1, 12), *[(1, 1)] * 4]


def test_both_sides_write_the_same_greedy_tokens(
    lm: dgemma.LanguageModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed is the same computation, not only the same number of calls."""
    ours, _ = our_parts(monkeypatch)
    theirs: list[int] = []
    run = oracle.model.encoder.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        theirs.extend((args[0] if args else kwargs["input_ids"]).flatten().tolist())
        return run(*args, **kwargs)

    monkeypatch.setattr(oracle.model.encoder, "forward", noting)
    model_bench._dgemma_causal(lm, PROMPT, 4)
    TimedReference(oracle).causal(torch.tensor([PROMPT]), 4)
    assert torch.cat([tokens.flatten() for tokens in ours]).tolist() == theirs


class Clock:
    """Replaces the stopwatch of the bench: time passes only in the calls it is told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        assert model_bench.time is reference.time
        monkeypatch.setattr(reference.time, "perf_counter", lambda: self.now)

    def by_tokens(self, count: int) -> None:
        self.now += 1.0 if count == 1 else 50.0

    def ticks_for(
        self, module: Any, door: str, patch: pytest.MonkeyPatch, seconds: Callable[[int], float]
    ) -> None:
        run = getattr(module, door)

        def ticking(*args: Any, **kwargs: Any) -> Any:
            tokens = args[0] if args else kwargs.get("input_ids", kwargs.get("decoder_input_ids"))
            self.now += seconds(tokens.shape[1])
            return run(*args, **kwargs)

        patch.setattr(module, door, ticking)


def test_the_references_time_is_told_apart_into_steps_and_commits(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    clock.ticks_for(oracle.model.encoder, "forward", monkeypatch, lambda n: 2.0 if n == CANVAS else 50.0)
    clock.ticks_for(oracle.model.decoder, "forward", monkeypatch, lambda n: 0.5)
    timed = TimedReference(oracle)
    prompt = torch.tensor([PROMPT])
    expected = ReferenceTimes(
        step_s=0.5, commit_s=2.0, total_s=50.0 + 2 * 2.0 + 3 * 4 * 0.5, num_tokens=3 * CANVAS
    )
    assert timed.diffuse(prompt, canvases=3, steps=4) == expected
    assert timed.diffuse(prompt, canvases=3, steps=4) == expected, "an earlier run is still counted"
    assert timed.diffuse(prompt, canvases=1, steps=4).commit_s is None


class FakeModel:
    """Answers with given times, and lets the clock pass while it writes causally."""

    def __init__(self, clock: Clock, num_tokens: int, steps: tuple[int, ...]) -> None:
        self.clock = clock
        self.config = SimpleNamespace(canvas_len=CANVAS)
        self.answer = Answer(
            text="",
            tokens=tuple(range(num_tokens)),
            finish_reason=FinishReason.LENGTH,
            seed=0,
            decode="diffuse",
            steps=steps,
            timings=Timings(prefill_s=3.0, denoise_s=6.0, commit_s=1.0, total_s=12.0),
        )

    def generate(self, prompt: list[int], **options: Any) -> Answer:
        return self.answer

    def stream(self, prompt: list[int], **options: Any) -> Iterator[Commit | Finish]:
        self.clock.now += 50.0
        for number in range(options["max_tokens"]):
            yield Commit(row=0, canvas=number, tokens=(1,), steps=0, text="")
            self.clock.now += 0.25
        yield Finish(row=0, answer=self.answer)


def test_our_figures_are_over_steps_commits_tokens_and_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake: Any = FakeModel(Clock(monkeypatch), num_tokens=3 * CANVAS, steps=(5, 5, 5))
    assert model_bench._dgemma_round(fake, PROMPT, PLAN) == {
        "seconds_per_step": 6.0 / 15,
        "seconds_per_commit": 1.0 / 2,  # the last canvas is not read again
        "seconds_per_causal_token": 0.25,
        "tokens_per_second": 3 * CANVAS / 12.0,  # prompt and all
    }


def test_a_canvas_that_settled_early_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = FakeModel(Clock(monkeypatch), num_tokens=3 * CANVAS, steps=(5, 2, 5))
    with pytest.raises(AssertionError):
        model_bench._dgemma_round(fake, PROMPT, PLAN)


def test_one_canvas_has_no_commit_on_either_side(
    lm: dgemma.LanguageModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_bench, "peak_growth_bytes", lambda run, device: None)
    plan = BenchPlan(prompt_tokens=4, canvases=1, steps=1, causal_tokens=1, rounds=1)
    found = run_bench(lm, TimedReference(oracle), plan)
    for side in ("dgemma", "reference", "times_faster"):
        assert found[side].keys() == FIGURES - {"seconds_per_commit"}


def test_sides_take_turns_are_warmed_up_and_seconds_and_speeds_point_the_same_way(
    lm: dgemma.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    said: list[str] = []

    def played(side: str, seconds: float) -> Callable[..., dict[str, float]]:
        def play(*args: Any) -> dict[str, float]:
            order.append(side)
            slow = 100.0 if order.count(side) == 1 else order.count(side) - 1.0  # rounds: 1x, 2x, 3x
            return {
                "seconds_per_step": seconds * slow,
                "seconds_per_commit": 3 * seconds * slow,
                "seconds_per_causal_token": 5 * seconds * slow,
                "tokens_per_second": 1 / (seconds * slow),
            }

        return play

    monkeypatch.setattr(model_bench, "_dgemma_round", played("ours", 1.0))
    monkeypatch.setattr(model_bench, "_reference_round", played("theirs", 4.0))
    monkeypatch.setattr(model_bench, "peak_growth_bytes", lambda run, device: None)
    plan = BenchPlan(rounds=3)
    found = run_bench(lm, SimpleNamespace(), plan, said.append)  # type: ignore[arg-type]
    assert order == ["ours", "theirs"] * 4
    assert said == ["warming up", "round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert found["dgemma"]["seconds_per_step"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert found["reference"]["seconds_per_step"] == {"median": 8.0, "min": 4.0, "max": 12.0}
    # Round by round we are four times as fast, however slow the round was.
    assert found["times_faster"] == {name: {"median": 4.0, "min": 4.0, "max": 4.0} for name in FIGURES}


def test_both_sides_get_the_same_prompt_and_the_peak_of_each_is_its_own(
    lm: dgemma.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: dict[str, list[list[int]]] = {"ours": [], "theirs": []}

    def our_diffuse(lm: Any, prompt: list[int], plan: BenchPlan) -> Answer:
        prompts["ours"].append(prompt)
        return FakeModel(clock, plan.canvases * CANVAS, (plan.steps,) * plan.canvases).answer

    class FakeReference:
        def diffuse(self, prompt: torch.Tensor, canvases: int, steps: int) -> ReferenceTimes:
            prompts["theirs"] += prompt.tolist()
            return ReferenceTimes(step_s=1.0, commit_s=1.0, total_s=1.0, num_tokens=canvases * CANVAS)

        def causal(self, prompt: torch.Tensor, num_tokens: int) -> float:
            return 1.0

    def peak(run: Callable[[], Any], device: torch.device) -> int:
        run()
        return 10 * len(prompts["ours"]) + len(prompts["theirs"])

    clock = Clock(monkeypatch)
    monkeypatch.setattr(model_bench, "_dgemma_diffuse", our_diffuse)
    monkeypatch.setattr(model_bench, "_dgemma_causal", lambda *args: 1.0)
    monkeypatch.setattr(model_bench, "peak_growth_bytes", peak)
    found = run_bench(lm, FakeReference(), PLAN)  # type: ignore[arg-type]
    assert prompts["ours"] == prompts["theirs"]
    assert len(prompts["ours"][0]) == PLAN.prompt_tokens
    # Two rounds of both, then one more of ours, then one more of theirs.
    assert found["peak_extra_bytes"] == {"dgemma": 32, "reference": 33}


def test_the_reference_is_on_the_same_weights(lm: dgemma.LanguageModel, oracle: Any) -> None:
    theirs = oracle.state_dict()
    for ours, name in (
        ("layers.1.experts.down.weight", "model.decoder.layers.1.experts.down_proj"),
        ("embedding.weight", "lm_head.weight"),
    ):
        assert torch.equal(lm.transformer.get_parameter(ours), theirs[name]), name
    assert oracle.dtype == lm.dtype
    assert not oracle.training


def test_a_checkpoint_with_a_vision_tower_has_a_reference_too(sure: Path, tmp_path: Path) -> None:
    """The tower is replaced by a tiny one; every other tensor must be the checkpoint's."""
    vision = {**reference._TINY_VISION, "hidden_size": 32, "head_dim": 16, "num_hidden_layers": 2}
    config = DiffusionGemmaConfig.from_dict(
        {**DiffusionGemmaConfig.from_pretrained(sure).to_dict(), "vision_config": vision}
    )
    torch.manual_seed(0)
    whole = DiffusionGemmaForBlockDiffusion(config)
    whole.save_pretrained(tmp_path)
    loaded = load_reference(tmp_path, torch.float32)
    assert loaded.config.vision_config.hidden_size == 16
    kept = loaded.state_dict()
    text = {name: tensor for name, tensor in whole.state_dict().items() if "vision" not in name}
    assert len(text) > 50
    assert all(torch.equal(tensor, kept[name]) for name, tensor in text.items())


def test_a_reference_on_other_weights_is_refused(
    sure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = DiffusionGemmaForBlockDiffusion.from_pretrained

    def lossy(*args: Any, **kwargs: Any) -> Any:
        model, info = load(*args, **kwargs)
        return model, {**info, "missing_keys": {"model.decoder.norm.weight"}}

    monkeypatch.setattr(DiffusionGemmaForBlockDiffusion, "from_pretrained", lossy)
    with pytest.raises(AssertionError, match="not on the same weights"):
        load_reference(sure, torch.float32)
