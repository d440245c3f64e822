"""A generation's events, limits, ends and deadlines, on a tiny model with a real tokenizer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma import Answer, Commit, Draft, Finish, FinishReason, InputError, LanguageModel
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.request import EngineRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from dgemma.sampling import vocab_scan
from dgemma.sampling.sampler import Acceptance, Sampler
from sizes import cases

FEW = {"max_denoising_steps": 3, "seed": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return path


@pytest.fixture(scope="module")
def lm(checkpoint: Path) -> LanguageModel:
    return dgemma.load(checkpoint)


def finished(events: Iterator[Any]) -> Answer:
    return next(event.answer for event in events if isinstance(event, Finish))


def test_a_stream_says_each_step_each_canvas_and_the_end(lm: LanguageModel) -> None:
    canvas_len = lm.config.canvas_len
    events = list(lm.stream("Hello", max_tokens=canvas_len + 5, ignore_end=True, **FEW))
    kinds = [type(event) for event in events]
    assert kinds == [Draft, Draft, Draft, Commit, Draft, Draft, Draft, Commit, Finish]
    drafts = [event for event in events if isinstance(event, Draft)]
    assert [draft.step for draft in drafts] == [1, 2, 3, 1, 2, 3]
    assert [draft.canvas for draft in drafts] == [0, 0, 0, 1, 1, 1]
    assert all(len(draft.tokens) == len(draft.entropy) == canvas_len for draft in drafts)
    commits = [event for event in events if isinstance(event, Commit)]
    assert [len(commit.tokens) for commit in commits] == [canvas_len, 5]
    answer = events[-1].answer
    assert answer.text == "".join(commit.text for commit in commits)
    assert answer.tokens == commits[0].tokens + commits[1].tokens
    assert answer.steps == (3, 3)
    assert answer.forwards == 6
    assert answer.tokens_per_forward == (canvas_len + 5) / 6
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.prompt_tokens == len(lm.tokenizer.encode("Hello")) + 1
    timings = answer.timings
    assert 0 <= timings.queue_s < timings.first_commit_s <= timings.total_s
    assert timings.prefill_s + timings.denoise_s + timings.commit_s <= timings.total_s


def test_drafts_change_nothing(lm: LanguageModel) -> None:
    with_drafts = finished(lm.stream("Hello", max_tokens=40, **FEW))
    without = lm.generate("Hello", max_tokens=40, **FEW)
    assert with_drafts.tokens == without.tokens
    assert with_drafts.text == without.text


def test_an_end_token_ends_the_answer_and_is_its_last_token(lm: LanguageModel) -> None:
    free = lm.generate("Hello", max_tokens=60, ignore_end=True, **FEW)
    end = free.tokens[7]
    first = free.tokens.index(end)
    answer = lm.generate("Hello", max_tokens=60, end_tokens=(end,), **FEW)
    assert answer.tokens == free.tokens[: first + 1]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text == lm.tokenizer.decode(free.tokens[:first])


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(lm: LanguageModel) -> None:
    free = lm.generate("Hello", max_tokens=64, ignore_end=True, **FEW)
    stop = free.text[9:13]
    answer = lm.generate("Hello", max_tokens=64, ignore_end=True, stop=stop, **FEW)
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.stop_string == stop
    assert answer.finish_reason is FinishReason.STOP
    assert len(answer.tokens) < 64


def test_a_stop_string_is_found_across_canvases(lm: LanguageModel) -> None:
    canvas_len = lm.config.canvas_len
    free = lm.generate("Hello", max_tokens=2 * canvas_len, ignore_end=True, **FEW)
    texts = lm.token_texts(free.tokens)
    border = len("".join(texts[:canvas_len]))
    stop = free.text[border - 3 : border + 3]
    answer = lm.generate("Hello", max_tokens=2 * canvas_len, ignore_end=True, stop=[stop], **FEW)
    assert answer.text == free.text[: free.text.index(stop)]


@pytest.mark.parametrize("decode", ["diffuse", "causal"])
def test_rows_of_a_batch_end_at_their_own_time(lm: LanguageModel, decode: str) -> None:
    prompts = ["Hello", "A much longer beginning of a text", "x"]
    exact = lm.exact()
    # Several canvases, or a forward per token.
    most, late = (70, 40) if decode == "diffuse" else (30, 20)
    options = {"max_tokens": most, "decode": decode, "max_denoising_steps": 3}
    alone = [exact.generate(p, seed=s, ignore_end=True, **options) for s, p in enumerate(prompts, start=5)]
    ends = tuple({alone[0].tokens[3], alone[1].tokens[late]})
    alone = [exact.generate(p, seed=s, end_tokens=ends, **options) for s, p in enumerate(prompts, start=5)]
    assert len({len(answer.tokens) for answer in alone}) > 1
    together = exact.generate(prompts, seed=5, end_tokens=ends, **options)
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.text, one.steps, one.seed) == (
            other.tokens, other.text, other.steps, other.seed,
        )  # fmt: skip


def test_token_ids_are_taken_as_they_are(lm: LanguageModel) -> None:
    ids = [lm.tokenizer.bos_id, *lm.tokenizer.encode("Hello")]
    assert lm.generate(ids, max_tokens=9, **FEW).tokens == lm.generate("Hello", max_tokens=9, **FEW).tokens
    both = lm.generate([ids, ids], seeds=[3, 3], max_tokens=9, max_denoising_steps=3)
    assert both[0].tokens == both[1].tokens


def test_without_a_seed_one_is_drawn_and_named(lm: LanguageModel) -> None:
    first = lm.generate("Hello", max_tokens=9, max_denoising_steps=3)
    again = lm.generate("Hello", max_tokens=9, max_denoising_steps=3, seed=first.seed)
    other = lm.generate("Hello", max_tokens=9, max_denoising_steps=3)
    assert again.tokens == first.tokens
    assert other.seed != first.seed


def test_temperature_zero_does_not_draw(lm: LanguageModel) -> None:
    """Noise still differs by seed; what was drawn does not: the whole canvas is accepted guesses."""
    draws: list[tuple[Tensor, Tensor]] = []

    @dataclass(frozen=True)
    class Watch:
        def __call__(self, reading: Any) -> Tensor:
            draws.append((reading.sampled, reading.argmax))
            return reading.entropy

    for temperature in (0.0, 1.0):
        sampler = Sampler(num_steps=3, score=Watch())
        lm.generate("Hello", max_tokens=9, temperature=temperature, sampler=sampler, seed=1)
    assert all(torch.equal(drawn, guess) for drawn, guess in draws[:3])
    assert not any(torch.equal(drawn, guess) for drawn, guess in draws[3:])


def test_a_researchers_own_part_is_ten_lines(lm: LanguageModel) -> None:
    @dataclass(frozen=True)
    class EveryOther:
        def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
            return free & (torch.arange(unsure.shape[-1]) % 2 == 0)

    rule: Acceptance = EveryOther()
    ours = lm.generate("Hello", max_tokens=20, seed=1, sampler=Sampler(num_steps=4, accept=rule))
    theirs = lm.generate("Hello", max_tokens=20, seed=1, max_denoising_steps=4)
    assert ours.tokens != theirs.tokens
    assert ours.steps == (4,)


@pytest.mark.parametrize(
    "options",
    [
        {"acceptance": "confidence", "min_confidence": 0.3},
        {"acceptance": "fixed", "accept_per_step": 3},
        {"top_k": 3},
        {"top_p": 0.3},
        {"preset": "thorough"},
        {"temperature": 2.0},
    ],
    ids=str,
)
def test_every_option_reaches_the_sampler(lm: LanguageModel, options: dict[str, Any]) -> None:
    base = {"max_tokens": 20, "seed": 1, "ignore_end": True}
    steps = {} if "preset" in options else {"max_denoising_steps": 6}
    plain = lm.generate("Hello", **base, **steps)
    other = lm.generate("Hello", **base, **steps, **options)
    assert plain.tokens != other.tokens or plain.steps != other.steps


def test_logprobs_hold_the_guess_first(lm: LanguageModel) -> None:
    answers = lm.generate(["Hello", "x"], max_tokens=40, logprobs=3, **FEW)
    for answer in answers:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.tokens)
        for token, words in zip(answer.tokens, answer.logprobs, strict=True):
            assert words[0][0] == token
            assert [p for _, p in words] == sorted((p for _, p in words), reverse=True)
            assert all(p <= 1e-6 for _, p in words)
    causal = lm.generate("Hello", max_tokens=4, logprobs=2, decode="causal", temperature=0)
    assert [words[0][0] for words in causal.logprobs or ()] == list(causal.tokens)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {"max_tokens": 10**9}, "max_tokens is 1000000000; this model's context leaves"),
        ([], {}, "prompt is an empty list"),
        ([[]], {}, "the prompt is empty"),
        ([5, 10**6], {}, "the prompt holds token 1000000; this vocabulary ends at 2047"),
        ([[5], [-1]], {}, "prompt 1 holds token -1"),
        ([5, "x"], {}, "prompt is a list of mixed things"),
        (7, {}, "prompt is a int; give text, token ids"),
        (["a", "b"], {"seeds": [1]}, "seeds has 1 numbers for 2 prompts"),
        (["a"], {"seeds": [1 << 70]}, "seed is"),
        (["a"], {"seeds": [None]}, "seeds has None; give a whole number for each prompt"),
        (["a"], {"seeds": 5}, "seeds is 5; give a list of numbers"),
        ("a \ud800 b", {}, "surrogate"),
        ("x", {"nonsense": 1}, "unknown option 'nonsense'"),
        ("x", {"sampler": Sampler(num_steps=0)}, "its num_steps is 0; it must be a whole"),
        ("x", {"sampler": Sampler(num_steps="3")}, "its num_steps is '3'"),  # type: ignore[arg-type]
        ("x", {"images": "photo.jpg"}, "images is a str; give a list of images"),
        ("x", {"images": Path("photo.jpg")}, "Path; give a list of images"),
    ],
)
def test_misuse_is_refused_by_name(
    lm: LanguageModel, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        lm.generate(prompt, **options)
    assert message in str(caught.value)


def test_a_prompt_that_leaves_no_canvas_is_refused(lm: LanguageModel) -> None:
    longest = lm.config.max_positions - lm.config.canvas_len
    with pytest.raises(InputError, match="no room for a canvas"):
        lm.generate([5] * (longest + 1))
    with pytest.raises(InputError, match="stream takes one"):
        lm.stream(["a", "b"])


def test_a_failed_call_leaves_the_model_as_it_was(lm: LanguageModel) -> None:
    before = lm.generate("Hello", max_tokens=9, **FEW).tokens
    for wrong in ("a\ud800", [10**6]):
        with pytest.raises(InputError):
            lm.generate(wrong, max_tokens=9)
    half_read = lm.stream("Hello", max_tokens=90, **FEW)
    next(half_read)
    half_read.close()
    assert lm.generate("Hello", max_tokens=9, **FEW).tokens == before


class SteppingClock:
    """A clock that only moves when asked: each look at it costs a tenth of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


@pytest.mark.parametrize("decode", ["diffuse", "causal"])
@pytest.mark.parametrize("deadline_s", [0.0, 0.3, 1.0, 2.0, 5.0])
def test_at_the_deadline_the_answer_so_far_is_returned_and_marked(
    lm: LanguageModel, deadline_s: float, decode: str
) -> None:
    params = GenerationParams(deadline_s=deadline_s, max_tokens=2000, ignore_end=True, decode=decode)  # type: ignore[arg-type]
    memory = KVCacheManager(full_blocks=80, window_blocks=80, block_size=32, window=lm.config.window)
    limits = SchedulerConfig(max_num_seqs=1, chunk_size=64, encode_block=64)
    engine = Engine({None: lm.transformer}, memory, limits, tokenizer=lm.tokenizer, clock=SteppingClock())
    engine.add(engine.validate(EngineRequest(prompt=(2, 17, 5), seed=1, params=params)))
    events: list[Any] = []
    while not engine.is_idle:
        events += [event for _, event in engine.step()]
    answer = events[-1].answer
    assert answer.finish_reason is FinishReason.DEADLINE
    commits = [event for event in events if isinstance(event, Commit)]
    assert answer.tokens == tuple(token for commit in commits for token in commit.tokens)
    provisional = sum(len(commit.tokens) for commit in commits if not commit.settled)
    assert answer.provisional_tokens == provisional
    if decode == "diffuse" and deadline_s >= 1:
        assert provisional == lm.config.canvas_len
    limit = max(1, len(answer.tokens))
    whole = lm.generate([2, 17, 5], seed=1, max_tokens=limit, ignore_end=True, decode=decode)
    kept = len(answer.tokens) - provisional
    assert answer.tokens[:kept] == whole.tokens[:kept], "what was committed is what would have been"


def test_the_deadline_is_kept_within_a_steps_time_in_fifty_runs(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only forwards move, each by a time of its own."""
    now, rng = [0.0], random.Random(1)
    monkeypatch.setattr(Transformer, "forward", taking_time(Transformer.forward, now, rng))
    over = []
    for number in range(50):
        deadline_s = 2 + number / 20  # two to four and a half steps
        params = GenerationParams(deadline_s=deadline_s, max_tokens=2000, ignore_end=True)
        memory = KVCacheManager(full_blocks=80, window_blocks=80, block_size=32, window=lm.config.window)
        limits = SchedulerConfig(max_num_seqs=1, chunk_size=64, encode_block=64)
        engine = Engine({None: lm.transformer}, memory, limits, tokenizer=lm.tokenizer, clock=lambda: now[0])
        times = [now[0]]
        engine.add(engine.validate(EngineRequest(prompt=(2, 17, 5), seed=number, params=params)))
        while not engine.is_idle:
            for _, event in engine.step():
                if isinstance(event, Finish):
                    assert event.answer.finish_reason is FinishReason.DEADLINE
            times.append(now[0])
        longest = max(b - a for a, b in itertools.pairwise(times))
        over.append((times[-1] - times[0] - deadline_s) / longest)
    over.sort()
    print(f"over the deadline, in steps: median {over[25]:.2f}, most {over[-1]:.2f}")
    assert over[-1] <= 1
    # Mostly it ends before another step would be too much; not all steps can be foreseen well.
    assert over[25] <= 0.5


def taking_time(forward: Any, now: list[float], rng: random.Random) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        now[0] += rng.lognormvariate(0, 0.3)
        return forward(*args, **kwargs)

    return timed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_and_lossless_write_the_causal_text(lm: LanguageModel, temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "seed": 3, "temperature": temperature, "ignore_end": True}
    causal, lossless, auto = (
        lm.generate("Hello", decode=decode, **options) for decode in ("causal", "lossless", "auto")
    )
    assert lossless.tokens == auto.tokens == causal.tokens
    assert (causal.forwards, causal.causal_tokens, causal.accepted) == (30, 30, ())
    assert lossless.forwards == sum(lossless.steps) + len(lossless.accepted)
    assert auto.decode == "auto"


def test_verified_keeps_more_of_a_canvas_with_a_lower_threshold(lm: LanguageModel) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "seed": 3, "ignore_end": True, "decode": "verified"}
    strict, all_ = (lm.generate("Hello", verify_threshold=least, **options) for least in (0.9, 0.0))
    assert len(all_.accepted) < len(strict.accepted)
    assert sum(all_.accepted) >= 30 - len(all_.accepted)


def test_sampling_causally_honours_the_seed(lm: LanguageModel) -> None:
    options: dict[str, Any] = {"decode": "causal", "max_tokens": 12, "ignore_end": True, "temperature": 3.0}
    one, again, other = (lm.generate("Hello", seed=seed, **options).tokens for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_a_causal_draw_among_one_word_is_the_greedy_one(lm: LanguageModel, narrow: dict[str, Any]) -> None:
    options: dict[str, Any] = {"decode": "causal", "max_tokens": 12, "ignore_end": True, "seed": 4}
    greedy = lm.generate("Hello", temperature=0, **options).tokens
    assert lm.generate("Hello", temperature=3.0, **options, **narrow).tokens == greedy
    assert lm.generate("Hello", temperature=3.0, **options).tokens != greedy


def test_an_answer_is_json(lm: LanguageModel) -> None:
    import json

    found = json.loads(json.dumps(lm.generate("Hello", max_tokens=9, logprobs=1, **FEW).to_json()))
    assert found["finish_reason"] in ("length", "stop")
    assert {"text", "tokens", "steps", "tokens_per_forward", "seed", "timings"} <= found.keys()


@pytest.mark.parametrize("exact", [False, True][: cases(2, 1)])
def test_a_compiled_model_compiles_when_it_is_loaded_and_writes_the_same(
    checkpoint: Path, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_scan, "kernels_for", lambda x: None)  # where there is one, nothing is compiled
    torch._dynamo.reset()
    compiled = dgemma.load(checkpoint, compile=True, exact=exact)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    assert before > 0
    answer = compiled.generate("Hello", max_tokens=40, **FEW)
    assert counters["unique_graphs"] == before, "no step of a request waits for a compiler"
    plain = dgemma.load(checkpoint, exact=exact).generate("Hello", max_tokens=40, **FEW)
    assert answer.tokens == plain.tokens
