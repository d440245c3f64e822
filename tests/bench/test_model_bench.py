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
from dgemma.bench.model_bench import BenchPlan, ModelBench, verdict
from dgemma.bench.reference import ReferenceTimes, TimedReference, load_reference
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.events import Answer, Commit, Finish, FinishReason, Timings
from dgemma.model.transformer import DenoiseInput, EncodeInput, Transformer

CANVAS = PRESETS["tiny"].config.canvas_len
PLAN = BenchPlan(prompt_tokens=12, canvases=3, steps=5, causal_tokens=4, rounds=1)
PROMPT = list(range(100, 112))
FIGURES = {"seconds_per_step", "seconds_per_commit", "seconds_per_causal_token", "tokens_per_second"}
OURS = FIGURES | {"seconds_to_first_text", "seconds_per_canvas"}


def diffuse(lm: dgemma.LanguageModel, plan: BenchPlan) -> Answer:
    return ModelBench(lm, None, plan)._diffuse(PROMPT, plan.canvases * CANVAS, plan.steps)


def causal_token_s(lm: dgemma.LanguageModel, num_tokens: int) -> float:
    return ModelBench(lm, None, BenchPlan(causal_tokens=num_tokens))._causal_token_s(PROMPT)


def fixed(bench: ModelBench) -> dict[str, Any]:
    bench.fixed()
    return bench.found


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
    answer = diffuse(lm, PLAN)
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
    assert diffuse(lm, plan).steps == (steps, steps)


def test_an_end_token_ends_neither_side(
    lm: dgemma.LanguageModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle.generation_config, "eos_token_id", [7, 8])  # all that this model writes
    monkeypatch.setitem(lm.__dict__, "generation_defaults", dgemma.GenerationParams.make(end_tokens=(7, 8)))
    assert len(lm.generate(PROMPT, max_tokens=2 * CANVAS, seed=0).tokens) < 2 * CANVAS
    plan = BenchPlan(canvases=2, steps=3)
    assert len(diffuse(lm, plan).tokens) == 2 * CANVAS
    assert TimedReference(oracle).diffuse(torch.tensor([PROMPT]), 2, 3).num_tokens == 2 * CANVAS


def test_a_causal_token_is_one_forward_on_both_sides(
    lm: dgemma.LanguageModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    read, _ = our_parts(monkeypatch, clock.by_tokens)
    seconds = causal_token_s(lm, 4)
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
    causal_token_s(lm, 4)
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
        self.config = SimpleNamespace(canvas_len=CANVAS, vocab_size=100)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        execution = SimpleNamespace(exact=False, fused_vocabulary=False)
        self.transformer = SimpleNamespace(execution=execution, parameters=list)
        self.answer = Answer(
            text="",
            tokens=tuple(range(num_tokens)),
            finish_reason=FinishReason.LENGTH,
            seed=0,
            decode="diffuse",
            steps=steps,
            timings=Timings(prefill_s=3.0, denoise_s=6.0, commit_s=1.0, first_commit_s=4.0, total_s=12.0),
        )

    def generate(self, prompts: list[list[int]], **options: Any) -> list[Answer]:
        return [self.answer for _ in prompts]

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
    assert ModelBench(fake, None, PLAN)._dgemma_round(torch.tensor([PROMPT])) == {
        "seconds_per_step": 6.0 / 15,
        "seconds_per_commit": 1.0 / 2,  # the last canvas is not read again
        "seconds_per_causal_token": 0.25,
        "tokens_per_second": 3 * CANVAS / 12.0,  # prompt and all
        "seconds_to_first_text": 4.0,
        "seconds_per_canvas": 4.0,
    }


def test_a_canvas_that_settled_early_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = FakeModel(Clock(monkeypatch), num_tokens=3 * CANVAS, steps=(5, 2, 5))
    with pytest.raises(AssertionError):
        ModelBench(fake, None, PLAN)._dgemma_round(torch.tensor([PROMPT]))


def test_one_canvas_has_no_commit_on_either_side(lm: dgemma.LanguageModel, oracle: Any) -> None:
    plan = BenchPlan(prompt_tokens=4, canvases=1, steps=1, causal_tokens=1, rounds=1)
    found = fixed(ModelBench(lm, TimedReference(oracle), plan))
    assert found["dgemma"].keys() == OURS - {"seconds_per_commit"}
    for side in ("reference", "times_faster"):
        assert found[side].keys() == FIGURES - {"seconds_per_commit"}


class FakeReference:
    """Takes no time, and notes its prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def diffuse(self, prompt: torch.Tensor, canvases: int, steps: int) -> ReferenceTimes:
        self.prompts += prompt.tolist()
        return ReferenceTimes(step_s=1.0, commit_s=1.0, total_s=1.0, num_tokens=canvases * CANVAS)

    def causal(self, prompt: torch.Tensor, num_tokens: int) -> float:
        return 1.0


def played(order: list[str], side: str, seconds: float, warm_ups: int) -> Callable[..., dict[str, float]]:
    """A side whose rounds take once, twice, three times `seconds`; its warm-up takes a hundred times."""

    def play(*args: Any) -> dict[str, float]:
        order.append(side)
        number = order.count(side) - warm_ups
        slow = 100.0 if number == 0 else float(number)
        return {
            "seconds_per_step": seconds * slow,
            "seconds_per_commit": 3 * seconds * slow,
            "seconds_per_causal_token": 5 * seconds * slow,
            "tokens_per_second": 1 / (seconds * slow),
        }

    return play


def test_sides_take_turns_are_warmed_up_and_seconds_and_speeds_point_the_same_way(
    lm: dgemma.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(ModelBench, "_dgemma_round", played(order, "ours", 1.0, 1))
    monkeypatch.setattr(model_bench, "_reference_round", played(order, "theirs", 4.0, 0))
    theirs: Any = FakeReference()
    found = fixed(ModelBench(lm, theirs, BenchPlan(rounds=3), said.append))
    assert order == ["ours", *["ours", "theirs"] * 3]
    assert len(theirs.prompts) == 1, "the reference is warmed up by one step, if that shows that it fits"
    assert [line.split(":")[0] for line in said] == [
        "warming up", "round 1 of 3", "round 2 of 3", "round 3 of 3",
    ]  # fmt: skip
    assert found["dgemma"]["seconds_per_step"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert found["reference"]["seconds_per_step"] == {"median": 8.0, "min": 4.0, "max": 12.0}
    # Round by round we are four times as fast, however slow the round was.
    assert found["times_faster"] == {name: {"median": 4.0, "min": 4.0, "max": 4.0} for name in FIGURES}


def test_both_sides_get_the_same_prompt_and_the_peak_of_each_is_its_own(
    lm: dgemma.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: list[list[int]] = []

    def our_diffuse(self: ModelBench, prompt: list[int], max_tokens: int, steps: int) -> Answer:
        ours.append(prompt)
        return FakeModel(clock, max_tokens, (steps,) * PLAN.canvases).answer

    def peak(run: Callable[[], Any], device: torch.device) -> int:
        run()
        return 10 * len(ours) + len(theirs.prompts)

    clock, theirs = Clock(monkeypatch), FakeReference()
    monkeypatch.setattr(ModelBench, "_diffuse", our_diffuse)
    monkeypatch.setattr(ModelBench, "_causal_token_s", lambda *args: 1.0)
    monkeypatch.setattr(model_bench, "peak_growth_bytes", peak)
    bench = ModelBench(lm, theirs, PLAN)  # type: ignore[arg-type]
    bench.fixed()
    assert ours[1:] == theirs.prompts[1:], "each warms up by itself, then rounds share their prompt"
    assert len(ours[0]) == PLAN.prompt_tokens
    bench.memory()
    # A warm-up and a round of both, then one more of ours, then one more of theirs.
    assert bench.found["peak_extra_bytes"] == {"dgemma": 32, "reference": 33}


def test_a_reference_too_slow_for_the_time_limit_is_left_out_by_name(
    lm: dgemma.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(model_bench.time, "monotonic", lambda: now[0])

    class Slow(FakeReference):
        def diffuse(self, *args: Any) -> ReferenceTimes:
            now[0] += 10.0
            return super().diffuse(*args)

    slow: Any = Slow()
    bench = ModelBench(lm, slow, BenchPlan(prompt_tokens=4, steps=4, rounds=1, time_limit_s=60.0))
    found = fixed(bench)
    assert len(slow.prompts) == 2, "the first call is slow anyway, so a second one decides"
    assert found["skipped"] == ["the reference: some 80 s, and 40 s are left"]
    assert "reference" not in found
    assert found["dgemma"]["seconds_per_step"]["median"] > 0


def test_the_first_figure_comes_after_one_round_and_the_others_may_not_fit(
    lm: dgemma.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    order: list[str] = []
    play = played(order, "ours", 1.0, 1)

    def slow(*args: Any) -> dict[str, float]:
        now[0] += 25.0
        return play()

    monkeypatch.setattr(model_bench.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ModelBench, "_dgemma_round", slow)
    found = fixed(ModelBench(lm, None, BenchPlan(rounds=9, time_limit_s=90.0)))
    assert found["rounds"] == 2
    assert found["skipped"] == ["the other rounds: some 25 s, and 15 s are left"]


def test_all_parts_of_a_small_model_are_measured_and_end_with_a_verdict(
    lm: dgemma.LanguageModel,
) -> None:
    plan = BenchPlan(
        prompt_tokens=8, canvases=2, steps=2, causal_tokens=2, rounds=1,
        lengths=(4, CANVAS, 1 << 20), length_steps=(2, 1), concurrency=(1, 2),
    )  # fmt: skip
    found = ModelBench(lm, None, plan).run()
    assert found["roofline"]["canvases"].keys() == {"1", "8"}
    for row in found["roofline"]["canvases"].values():
        assert 0 < row["share_of_roofline"] < 1
    assert [row["tokens"] for row in found["lengths"]] == [4, CANVAS]
    for row in found["lengths"]:
        assert row["causal_s"] > 0
        assert row["diffuse_2_times_faster"] == row["causal_s"] / row["diffuse_2_s"]
        assert {"causal_s_predicted", "diffuse_2_s_predicted", "diffuse_1_s_predicted"} <= row.keys()
    assert [row["answers"] for row in found["throughput"]] == [1, 2]
    longest = lm.config.max_positions - 8
    assert found["skipped"] == [f"{1 << 20} tokens: the context leaves {longest}"]
    assert found["real_prompts"].keys() == {"fast", "balanced", "thorough", "causal"}
    for row in found["real_prompts"].values():
        assert row["tokens_per_second"] > 0
    assert found["verdict"].startswith("Speed of diffusion against left to right here: with 2 steps")


def test_throughput_leaves_the_prompts_out_since_the_sides_write_different_numbers_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeModel(Clock(monkeypatch), num_tokens=90, steps=(5, 5, 5))
    assert model_bench._tokens_per_second([fake.answer, fake.answer]) == 2 * 90 / (12.0 - 3.0)


def row_of(tokens: int, **gains: float) -> dict[str, Any]:
    return {"tokens": tokens, "causal_s": 1.0, **gains}


def test_the_verdict_names_the_length_and_the_concurrency_where_it_turns() -> None:
    plan = {"length_steps": (16, 8), "steps": 8}
    rows = [
        row_of(16, diffuse_16_times_faster=0.2, diffuse_8_times_faster=0.4),
        row_of(64, diffuse_16_times_faster=0.8, diffuse_8_times_faster=1.6),
        row_of(256, diffuse_16_times_faster=0.9, diffuse_8_times_faster=3.0),
    ]
    many = [
        {"answers": 1, "diffuse_times_faster": 3.0},
        {"answers": 4, "diffuse_times_faster": 1.2},
        {"answers": 8, "diffuse_times_faster": 0.7},
    ]
    text = verdict({"plan": plan, "lengths": rows, "throughput": many})
    assert "with 16 steps a canvas 0.2 times at 16, 0.8 times at 64, 0.9 times at 256 tokens" in text
    assert "Use diffusion from 64 tokens on if 8 steps a canvas are enough" in text
    assert text.endswith("With 8 steps, left to right is faster from 8 answers at once.")
    slow = [row_of(256, diffuse_16_times_faster=0.9, diffuse_8_times_faster=0.95)]
    assert verdict({"plan": plan, "lengths": slow}).endswith(
        "Left to right is faster for every length: use --decode causal on this machine."
    )
    assert verdict({"plan": plan}).startswith("Too little was measured")
    # Left to right alone says nothing of diffusion.
    assert verdict({"plan": plan, "lengths": [row_of(16)]}).startswith("Too little was measured")


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
