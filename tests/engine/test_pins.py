"""What is given of an answer, through the engine: it holds in every canvas, in any company, and is told."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given as given_cases
from hypothesis import settings
from hypothesis import strategies as st

from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.model_runner import scan_rows
from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Failed
from dgemma.errors import InputError
from dgemma.events import Answer, Commit, Draft, Event, Finish, FinishReason, Timings
from dgemma.language_model import LanguageModel
from dgemma.params import GenerationParams
from dgemma.sampling.rng import NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import make_sampler, open_canvas, step
from dgemma.sampling.vocab_scan import sample_dense, scale
from engine_life import CONFIG, ENCODE_BLOCK, tiny_models
from plain_answer import plain_answer
from sizes import cases

CANVAS = 8
VOCAB = CONFIG.vocab_size
RULES = ("entropy_bound", "confidence", "fixed")
PROMPT = (2, 300, 301, 17, 5)
# Under so little heat the random model is sure of many words, so that canvases settle by themselves.
COOL: dict[str, Any] = {"t_min": 0.05, "t_max": 0.1}


def fresh(canvas_len: int = CANVAS) -> LanguageModel:
    """An exact handle that remembers nothing yet."""
    return LanguageModel(tiny_models()[None].transformer.with_lengths(canvas_len=canvas_len))


def ask(
    given: PinnedTokens | None = None,
    *,
    prompt: tuple[int, ...] = PROMPT,
    seed: int = 1,
    drafts: bool = False,
    bias: tuple[tuple[int, float], ...] = (),
    **options: Any,
) -> EngineRequest:
    params = GenerationParams(**{"max_denoising_steps": 3, "ignore_end": True, **options})
    return EngineRequest(
        prompt=prompt, seed=seed, params=params, drafts=drafts, logit_bias=bias, pinned=given
    )


def events_of(lm: LanguageModel, *requests: EngineRequest) -> list[Event]:
    return list(lm._local_engine.run([replace(one, row=row) for row, one in enumerate(requests)]))


def answer_of(lm: LanguageModel, request: EngineRequest) -> Answer:
    (answer,) = lm._ask([request])
    return answer


def forwards_of(lm: LanguageModel) -> int:
    return lm._local_engine._engine.stats().counters["denoise_forwards"]


def fixed_range(begin: int, end: int) -> dict[int, int]:
    return {at: 100 + at for at in range(begin, end)}


def content(answer: Answer) -> Answer:
    """All that must not depend on the company."""
    return replace(answer, timings=Timings(), cached_tokens=0)


def check_kept(answer: Answer, given: PinnedTokens | None) -> None:
    given = given or PinnedTokens()
    for at, token in enumerate(answer.tokens):
        assert token == given.fixed.get(at, token), f"position {at} was fixed"
        assert token in given.among.get(at, (token,)), f"position {at} was limited"
    assert answer.pinned == tuple(at for at in range(len(answer.tokens)) if at in given.fixed)


# The plain twin


@torch.inference_mode()
def plainly(lm: LanguageModel, request: EngineRequest) -> tuple[list[int], list[int], dict[int, list[float]]]:
    """-> tokens, steps, watched: the two doors and dense logits, pins put in one by one."""
    given, params = request.pinned or PinnedTokens(), request.params
    sampler, size = make_sampler(params), lm.config.canvas_len
    tokens: list[int] = []
    counts: list[int] = []
    watched: dict[int, list[float]] = {}
    cache_ = lm.new_cache(1)
    lm.encode(torch.tensor([request.prompt]), cache_)
    assert params.max_tokens is not None
    while len(tokens) < params.max_tokens:
        begin, number = len(tokens), len(counts)
        place = noise_key([request.seed], [number], [0], lm.device)
        canvas = random_tokens(place, NoiseStream.OPEN, size, VOCAB)
        free = torch.ones(1, size, dtype=torch.bool)
        for at in range(size):
            canvas[0, at] = given.fixed.get(begin + at, given.begin.get(begin + at, int(canvas[0, at])))
            free[0, at] = begin + at not in given.fixed
        state, soft, steps = open_canvas(canvas), None, 0
        if not free[0, : params.max_tokens - begin].any():
            state = replace(state, settled=torch.tensor([True]))
        while not state.settled:
            place = noise_key([request.seed], [number], [steps], lm.device)
            draws = place if params.temperature > 0 else None
            heat = sampler.schedule((sampler.num_steps - state.steps).to(torch.int32), sampler.num_steps)
            hidden = lm.denoise(state.canvas, cache_, soft)
            reading = scan_rows(lm.transformer, hidden, heat, draws, params)
            dense = lm.logits(hidden)
            for at in range(size):
                words = given.among.get(begin + at)
                if begin + at in given.fixed:
                    reading.argmax[0, at] = reading.sampled[0, at] = given.fixed[begin + at]
                    reading.entropy[0, at] = reading.log_mass[0, at] = reading.top_logit[0, at] = 0.0
                    reading.soft[0, at] = lm.transformer.embed(torch.tensor(given.fixed[begin + at]))
                elif words is not None:
                    others = torch.ones(VOCAB, dtype=torch.bool)
                    others[list(words)] = False
                    dense[0, at, others] = -math.inf
                    scaled = scale(dense, heat)
                    reading.argmax[0, at] = scaled[0, at].argmax()
                    reading.sampled[0, at] = reading.argmax[0, at]
                    if draws is not None:
                        reading.sampled[0, at] = sample_dense(scaled, draws)[0, at]
                    shares = scaled[0, at].softmax(-1)
                    reading.entropy[0, at] = torch.special.entr(shares).sum()
                    reading.log_mass[0, at] = scaled[0, at].logsumexp(-1)
                    reading.top_logit[0, at] = scaled[0, at].amax()
                    reading.soft[0, at] = lm.soft_embedding(scaled)[0, at]
            noise = random_tokens(place, NoiseStream.RENOISE, size, VOCAB)
            state = step(state, reading, noise, sampler, free)
            soft, steps = reading.soft, steps + 1
            if state.settled:
                log_probs = dense[0].log_softmax(-1)
                for at in range(begin, begin + size):
                    if at in given.watch:
                        watched[at] = log_probs[at - begin, list(given.watch[at])].tolist()
        guess = state.argmax[0].tolist()
        tokens += guess[: params.max_tokens - begin]
        counts.append(steps)
        lm.encode(torch.tensor([guess]), cache_)
    return tokens, counts, watched


TWINS = {
    "nothing": None,
    "one position": PinnedTokens(fixed={3: 77}),
    "every other": PinnedTokens(fixed={at: 400 - at for at in range(0, 20, 2)}),
    "across a border": PinnedTokens(fixed=fixed_range(6, 11)),
    "a whole canvas in the middle": PinnedTokens(fixed=fixed_range(8, 16)),
    "sets": PinnedTokens(among={at: (5, 9, 17, 400, 511)[: 1 + at % 5] for at in range(20)}),
    "a beginning": PinnedTokens(begin={at: 60 + at for at in range(0, 20, 3)}),
    "all kinds": PinnedTokens(
        fixed={1: 9, 8: 10, 19: 11},
        among={2: (3, 4), 9: (5, 6, 7)},
        begin={4: 200, 10: 201, 8: 5},
        watch={0: (1, 500), 1: (9, 8), 9: (7, 6, 5, 4), 18: (12,)},
    ),
}


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *((kind, RULES[number % 3]) for number, kind in enumerate(TWINS)),
        *(("all kinds", r) for r in RULES[:1] + RULES[2:]),
    ],
)
def test_an_answer_with_pins_equals_the_reference(kind: str, rule: str) -> None:
    temperature = 0.0 if kind == "every other" else 1.0
    request = ask(
        TWINS[kind], max_tokens=20, acceptance=rule, accept_per_step=3, temperature=temperature, **COOL
    )
    answer = answer_of(fresh(), request)
    tokens, steps, watched = plainly(fresh(), request)
    assert list(answer.tokens) == tokens
    assert list(answer.steps) == steps
    check_kept(answer, request.pinned)
    assert [at for at, _ in answer.watched] == sorted(watched)
    for at, words in answer.watched:
        assert [word for word, _ in words] == list(request.pinned.watch[at])
        assert [value for _, value in words] == pytest.approx(watched[at], abs=1e-4)


def test_pins_are_what_makes_the_difference() -> None:
    """What is pinned is not what would have been written, and what follows depends on it."""
    free = answer_of(fresh(), ask(max_tokens=24, **COOL))
    pinned = answer_of(fresh(), ask(PinnedTokens(fixed=fixed_range(0, 4)), max_tokens=24, **COOL))
    other = answer_of(fresh(), ask(PinnedTokens(fixed=dict.fromkeys(range(4), 7)), max_tokens=24, **COOL))
    assert not set(enumerate(free.tokens[:4])) & set(enumerate(pinned.tokens[:4]))
    assert len({answer.tokens[4:] for answer in (free, pinned, other)}) == 3


# In company

QUESTIONS = 24
# Who asks in the same manner looks at the vocabulary together: hence so few of them.
MANNERS: list[dict[str, Any]] = [
    {"max_denoising_steps": 3, **COOL},
    {"max_denoising_steps": 3, "acceptance": "confidence", "min_confidence": 0.3, "logprobs": 3},
    {"max_denoising_steps": 2, "acceptance": "fixed", "accept_per_step": 2, "temperature": 0.0},
    {"max_denoising_steps": 4, "entropy_bound": 2.0, "top_k": 5, "bias": ((3, -100.0), (40, 2.0)), **COOL},
]


def question(number: int) -> EngineRequest:
    """One of a few, so that their answers alone are computed once. Every third one has no pins."""
    rng = random.Random(f"pinned question {number}")
    max_tokens = rng.choice((1, 5, 8, 11, 16, 20))
    given = None
    if number % 3:
        kinds = rng.choices(
            ("free", "fixed", "among", "begin"), rng.choice(((1, 1, 1, 1), (1, 8, 0, 0))), k=24
        )
        fixed = {at: rng.randrange(VOCAB) for at in range(max_tokens) if kinds[at] == "fixed"}
        if max_tokens > CANVAS and rng.random() < 0.4:
            fixed |= fixed_range(0, CANVAS)
        sets = {at: tuple(sorted(rng.sample(range(VOCAB), rng.randint(1, 5)))) for at in range(max_tokens)}
        given = PinnedTokens(
            fixed=fixed,
            among={at: sets[at] for at in sets if kinds[at] == "among" and at not in fixed},
            begin={at: rng.randrange(VOCAB) for at in range(max_tokens) if kinds[at] == "begin"},
            watch={at: sets[at] for at in sets if rng.random() < 0.2},
        )
    return ask(
        given,
        prompt=tuple(PROMPT[: rng.randint(1, 5)])
        + tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(20))),
        seed=rng.randrange(1 << 64),
        max_tokens=max_tokens,
        ignore_end=rng.random() < 0.8,
        **MANNERS[number % len(MANNERS)],
    )


@cache
def alone(number: int) -> Answer:
    return content(answer_of(fresh(), question(number)))


def together(numbers: list[int], seed: int) -> dict[int, Answer]:
    """Through an engine of few slots, whose prompts come in chunks; some come later than others."""
    rng = random.Random(seed)
    memory = KVCacheManager(full_blocks=30, window_blocks=30, block_size=8, window=CONFIG.window)
    engine = Engine(
        {None: fresh().transformer},
        memory,
        SchedulerConfig(
            max_num_seqs=rng.choice((2, 4)), chunk_size=rng.choice((8, 64)), encode_block=ENCODE_BLOCK
        ),
    )
    coming = list(enumerate(numbers))
    answers: dict[int, Answer] = {}
    while coming or not engine.is_idle:
        while coming and (engine.is_idle or rng.random() < 0.6):
            row, number = coming.pop(0)
            engine.add(engine.validate(replace(question(number), row=row)))
        for _, event in engine.step():
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Finish):
                answers[event.row] = event.answer
    stats = engine.stats()
    assert (stats.slots_used, stats.full_blocks_used, stats.window_blocks_used) == (0, 0, 0)
    assert stats.counters["denoise_forwards"] == sum(sum(answer.steps) for answer in answers.values())
    return answers


@given_cases(
    numbers=st.lists(st.integers(0, QUESTIONS - 1), min_size=2, max_size=4),
    manner=st.sampled_from([None, *range(len(MANNERS))]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=cases(40, 20), deadline=None, derandomize=True, database=None)
def test_an_answer_with_pins_or_beside_them_is_the_one_given_alone(
    numbers: list[int], manner: int | None, seed: int
) -> None:
    if manner is not None:
        numbers = [number - number % len(MANNERS) + manner for number in numbers]
    answers = together(numbers, seed)
    for row, number in enumerate(numbers):
        check_kept(answers[row], question(number).pinned)
        assert content(answers[row]) == alone(number), f"question {number} in {numbers}"


def test_the_questions_above_have_all_that_can_be_given() -> None:
    """Else they would show less than they claim."""
    given = [question(number).pinned or PinnedTokens() for number in range(QUESTIONS)]
    assert all(any(getattr(one, name) for one in given) for name in ("fixed", "among", "begin", "watch"))
    assert any(0 in alone(number).steps for number in range(QUESTIONS))
    assert len({alone(number).tokens for number in range(QUESTIONS)}) > QUESTIONS - 3


def test_a_request_without_pins_is_the_same_beside_pinned_ones() -> None:
    request = ask(max_tokens=20, **COOL)
    company = [ask(TWINS[kind], max_tokens=20, **COOL) for kind in ("sets", "all kinds", "across a border")]
    answers = fresh()._ask([company[0], request, *company[1:]])
    twin = plain_answer(fresh(), request.prompt, seed=request.seed, params=request.params)
    assert content(answers[1]) == content(twin)


@pytest.mark.parametrize("rule", RULES)
def test_pins_hold_in_the_default_way_too(rule: str) -> None:
    lm = fresh().exact(False)
    given = TWINS["all kinds"]
    requests = [
        ask(one, seed=seed, max_tokens=20, acceptance=rule, accept_per_step=2)
        for seed in range(3)
        for one in (None, given, TWINS["sets"], TWINS["a whole canvas in the middle"])
    ]
    for request, answer in zip(requests, lm._ask(requests), strict=True):
        assert len(answer.tokens) == 20
        check_kept(answer, request.pinned)


def test_all_prompts_of_a_call_have_the_same_pins() -> None:
    pins = {0: 5, 9: [6, 7, 400], 10: 8}
    answers = fresh().generate(
        [[5, 6], [7, 8, 9], [10]], pins=pins, seed=1, max_tokens=11, ignore_end=True, max_denoising_steps=2
    )
    for answer in answers:
        check_kept(answer, PinnedTokens.from_pins(pins))
        assert answer.pinned == (0, 10)
    assert len({answer.tokens for answer in answers}) == 3


# What costs nothing


def test_a_canvas_that_is_pinned_as_a_whole_costs_no_forward() -> None:
    lm = fresh()
    answer = answer_of(lm, ask(PinnedTokens(fixed=fixed_range(0, CANVAS)), max_tokens=CANVAS))
    assert answer.tokens == tuple(range(100, 108))
    assert answer.steps == (0,)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.forwards == 0
    assert forwards_of(lm) == 0


@pytest.mark.parametrize(
    ("begin", "end", "free"),
    [(0, 8, [1, 2]), (8, 16, [0, 2]), (16, 24, [0, 1]), (0, 16, [2]), (8, 24, [0]), (0, 24, [])],
    ids=["first", "middle", "last", "first two", "last two", "all"],
)
def test_a_whole_canvas_among_others_costs_no_forward(begin: int, end: int, free: list[int]) -> None:
    lm = fresh()
    events = events_of(lm, ask(PinnedTokens(fixed=fixed_range(begin, end)), max_tokens=24, drafts=True))
    answer = events[-1].answer
    assert answer.steps == tuple(3 if canvas in free else 0 for canvas in range(3))
    assert forwards_of(lm) == 3 * len(free)
    assert len(answer.tokens) == 24
    assert answer.pinned == tuple(range(begin, end))
    commits = [event for event in events if isinstance(event, Commit)]
    assert [commit.canvas for commit in commits] == [0, 1, 2]
    assert tuple(token for commit in commits for token in commit.tokens) == answer.tokens
    assert {event.canvas for event in events if isinstance(event, Draft)} == set(free)


@pytest.mark.parametrize("max_tokens", [1, 3, 9, 15])
def test_an_answer_that_ends_within_its_pinned_canvas_costs_no_forward_for_it(max_tokens: int) -> None:
    """Nobody sees what would stand behind the end."""
    lm = fresh()
    last = (max_tokens - 1) // CANVAS
    answer = answer_of(
        lm, ask(PinnedTokens(fixed=fixed_range(last * CANVAS, max_tokens)), max_tokens=max_tokens)
    )
    assert answer.steps == (3,) * last + (0,)
    assert forwards_of(lm) == 3 * last
    assert answer.tokens[last * CANVAS :] == tuple(range(100 + last * CANVAS, 100 + max_tokens))
    assert answer.finish_reason is FinishReason.LENGTH


def test_one_open_position_of_those_that_are_shown_costs_forwards() -> None:
    lm = fresh()
    answer = answer_of(lm, ask(PinnedTokens(fixed=fixed_range(0, 4)), max_tokens=5))
    assert answer.steps == (3,)
    assert forwards_of(lm) == 3


def test_a_set_of_one_word_is_found_and_not_pinned() -> None:
    lm = fresh()
    answer = answer_of(
        lm, ask(PinnedTokens(among={at: (100 + at,) for at in range(CANVAS)}), max_tokens=CANVAS)
    )
    assert answer.tokens == tuple(range(100, 108))
    assert answer.pinned == ()
    assert answer.steps == (2,), "sure at once, and stable a step later"


def test_an_end_token_that_is_pinned_ends_the_answer() -> None:
    lm = fresh()
    given = PinnedTokens(fixed={**fixed_range(0, CANVAS), 2: 1})
    answer = answer_of(lm, ask(given, max_tokens=24, ignore_end=False))
    assert answer.tokens == (100, 101, 1)
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.pinned, answer.steps, forwards_of(lm)) == ((0, 1, 2), (0,), 0)


def test_what_follows_a_pinned_canvas_reads_it() -> None:
    """As it would read the same tokens at the end of a prompt."""
    given = PinnedTokens(fixed=fixed_range(0, CANVAS), begin={CANVAS + at: 200 + at for at in range(CANVAS)})
    options: dict[str, Any] = {"max_denoising_steps": 1, "temperature": 0.0}
    answer = answer_of(fresh(), ask(given, max_tokens=2 * CANVAS, **options))
    moved = PinnedTokens(begin={at: 200 + at for at in range(CANVAS)})
    longer = ask(moved, prompt=(*PROMPT, *range(100, 108)), max_tokens=CANVAS, **options)
    assert answer.tokens[CANVAS:] == answer_of(fresh(), longer).tokens
    assert answer.tokens[CANVAS:] != answer_of(fresh(), replace(longer, prompt=PROMPT)).tokens


# When it stops


def test_a_canvas_stops_when_its_open_positions_are_settled_and_not_before() -> None:
    canvas, open_ones, most, sure = 32, (3, 17, 30), 12, 0.02
    given = PinnedTokens(fixed={at: 100 + at for at in range(canvas) if at not in open_ones})
    lm = fresh(canvas)
    too_early = by_itself = 0
    for seed in range(16):
        request = ask(
            given,
            seed=seed,
            max_tokens=canvas,
            drafts=True,
            max_denoising_steps=most,
            confidence_threshold=sure,
            **COOL,
        )
        *drafts, _, finish = events_of(lm, request)
        guesses = [draft.tokens for draft in drafts]
        stable = [False] + [a == b for a, b in pairwise(guesses)]
        means = [sum(draft.entropy[at] for at in open_ones) / 3 for draft in drafts]
        among_all = [sum(draft.entropy) / canvas for draft in drafts]
        ends = [is_stable and mean < sure for is_stable, mean in zip(stable, means, strict=True)]
        assert ends[:-1] == [False] * (len(drafts) - 1), "it was settled, and went on"
        assert ends[-1] or len(drafts) == most, "it stopped, and was not settled"
        assert finish.answer.steps == (len(drafts),)
        by_itself += ends[-1] and len(drafts) < most
        too_early += any(a and mean < sure for a, mean in zip(stable[:-1], among_all[:-1], strict=True))
    assert by_itself, "some settled before the last step"
    assert too_early, "and some would have stopped too early had pinned positions counted"


# What is told


def test_events_say_what_was_pinned() -> None:
    fixed = {0: 11, 5: 12, 9: 13, 15: 14, 18: 15}
    given = PinnedTokens(fixed=fixed, among={1: (4, 5)}, begin={2: 6}, watch={3: (7,)})
    events = events_of(fresh(), ask(given, max_tokens=19, drafts=True))
    drafts = [event for event in events if isinstance(event, Draft)]
    commits = [event for event in events if isinstance(event, Commit)]
    by_canvas = {0: (0, 5), 1: (1, 7), 2: (2,)}
    assert [(draft.canvas, draft.step) for draft in drafts] == [(c, s) for c in range(3) for s in (1, 2, 3)]
    for event in (*drafts, *commits):
        assert event.pinned == by_canvas[event.canvas]
        for at in event.pinned:
            assert event.tokens[at] == fixed[CANVAS * event.canvas + at]
    for draft in drafts:
        assert all(draft.entropy[at] == 0.0 for at in draft.pinned)
        assert all(draft.entropy[at] > 0.0 for at in range(CANVAS) if at not in draft.pinned)
    assert events[-1].answer.pinned == tuple(fixed)
    assert events[-1].answer.to_json()["pinned"] == tuple(fixed)


def test_events_say_nothing_of_pins_after_the_end() -> None:
    given = PinnedTokens(fixed={1: 11, 3: 1, 6: 12})
    events = events_of(fresh(), ask(given, max_tokens=20, drafts=True, ignore_end=False, temperature=0.0))
    answer = events[-1].answer
    assert answer.finish_reason is FinishReason.STOP
    assert len(answer.tokens) == 4, "no end token is met before"
    assert all(event.pinned == (1, 3) for event in events if not isinstance(event, Finish))
    assert answer.pinned == (1, 3)


def test_an_answer_without_pins_says_so() -> None:
    events = events_of(fresh(), ask(max_tokens=8, drafts=True), ask(PinnedTokens(fixed={0: 1}), max_tokens=8))
    mine = [event for event in events if event.row == 0]
    assert all(event.pinned == () for event in mine if not isinstance(event, Finish))
    assert mine[-1].answer.pinned == mine[-1].answer.watched == ()


@torch.inference_mode()
def dense_logits(lm: LanguageModel, prompt: tuple[int, ...], canvas: torch.Tensor) -> torch.Tensor:
    """[canvas, vocabulary] behind the first look at a canvas."""
    cache_ = lm.new_cache(1)
    lm.encode(torch.tensor([prompt]), cache_)
    return lm.logits(lm.denoise(canvas, cache_))[0]


def test_a_beginning_is_what_the_first_step_reads() -> None:
    begin = {at: 60 + 7 * at for at in range(CANVAS)}
    request = ask(PinnedTokens(begin=begin), max_tokens=CANVAS, max_denoising_steps=1)
    answer = answer_of(fresh(), request)
    logits = dense_logits(fresh(), PROMPT, torch.tensor([list(begin.values())]))
    assert list(answer.tokens) == logits.argmax(-1).tolist()
    assert list(answer.tokens) != list(begin.values()), "the model may change it"
    assert answer.pinned == ()
    assert answer.tokens != answer_of(fresh(), replace(request, pinned=None)).tokens


def test_a_beginning_of_some_positions_leaves_noise_in_the_others() -> None:
    request = ask(PinnedTokens(begin={1: 60, 6: 70}), max_tokens=CANVAS, max_denoising_steps=1, seed=9)
    canvas = random_tokens(noise_key([9], [0], [0], torch.device("cpu")), NoiseStream.OPEN, CANVAS, VOCAB)
    canvas[0, 1], canvas[0, 6] = 60, 70
    assert (
        list(answer_of(fresh(), request).tokens) == dense_logits(fresh(), PROMPT, canvas).argmax(-1).tolist()
    )


def test_watched_words_are_told_as_the_dense_logits_have_them() -> None:
    begin = {at: 60 + 7 * at for at in range(CANVAS)}
    watch = {0: (5, 400, 17), 3: tuple(range(VOCAB)), 7: (67,)}
    request = ask(PinnedTokens(begin=begin, watch=watch), max_tokens=CANVAS, max_denoising_steps=1)
    told = dict(answer_of(fresh(), request).watched)
    truth = dense_logits(fresh(), PROMPT, torch.tensor([list(begin.values())])).double().log_softmax(-1)
    assert list(told) == [0, 3, 7]
    for at, words in told.items():
        assert tuple(word for word, _ in words) == watch[at]
        assert [value for _, value in words] == pytest.approx(truth[at, list(watch[at])].tolist(), abs=1e-4)
    assert sum(math.exp(value) for _, value in told[3]) == pytest.approx(1, abs=1e-4)


def test_watched_words_of_a_set_are_told_under_the_set_and_those_of_a_pin_as_the_model_has_them() -> None:
    given = PinnedTokens(
        fixed={2: 9}, among={10: (5, 6, 7)}, watch={2: (9, 10), 10: (7, 5, 6, 8), 11: tuple(range(VOCAB))}
    )
    told = {at: dict(words) for at, words in answer_of(fresh(), ask(given, max_tokens=12)).watched}
    assert list(told) == [2, 10, 11]
    assert all(-math.inf < value < -1e-3 for value in told[2].values())
    assert sum(math.exp(value) for value in told[10].values()) == pytest.approx(1, abs=1e-5)
    assert told[10][8] == -math.inf
    assert sum(math.exp(value) for value in told[11].values()) == pytest.approx(1, abs=1e-4)


def test_watching_changes_nothing() -> None:
    given = PinnedTokens(fixed={3: 8}, among={4: (9, 10)})
    plain = answer_of(fresh(), ask(given, max_tokens=12))
    watching = answer_of(fresh(), ask(replace(given, watch={0: (1,), 3: (2,), 4: (9,)}), max_tokens=12))
    assert len(watching.watched) == 3
    assert content(replace(watching, watched=())) == content(plain)


def test_the_log_probability_of_a_pinned_word_is_zero_and_those_of_a_set_sum_to_one() -> None:
    given = PinnedTokens(fixed={0: 9, 6: 10, 8: 11}, among={1: (5, 6), 9: (7,), 2: (1, 2, 3, 4, 5, 6)})
    events = events_of(fresh(), ask(given, max_tokens=12, logprobs=4))
    answer = events[-1].answer
    assert answer.logprobs == tuple(w for e in events if isinstance(e, Commit) for w in e.logprobs)
    assert len(answer.logprobs) == 12
    for at, words in enumerate(answer.logprobs):
        if at in given.fixed:
            assert words == ((given.fixed[at], 0.0),)
            continue
        assert len(words) == min(4, len(given.among.get(at, range(4))))
        assert {word for word, _ in words} <= set(given.among.get(at, range(VOCAB)))
        assert words[0][0] == answer.tokens[at]
        assert list(words) == sorted(words, key=lambda word: -word[1])
    for at in (1, 9):
        assert sum(math.exp(value) for _, value in answer.logprobs[at]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("begin", "end"), [(0, 8), (8, 16), (0, 24)], ids=["first", "middle", "all"])
def test_a_canvas_that_is_pinned_as_a_whole_has_its_log_probabilities_too(begin: int, end: int) -> None:
    """Else those of the canvases behind it would stand at the wrong tokens."""
    fixed = fixed_range(begin, end)
    events = events_of(fresh(), ask(PinnedTokens(fixed=fixed), max_tokens=24, logprobs=2))
    answer = events[-1].answer
    assert len(answer.logprobs) == len(answer.tokens) == 24
    for at, words in enumerate(answer.logprobs):
        assert words[0][0] == answer.tokens[at]
        assert len(words) == (1 if at in fixed else 2)
    for commit in events[:-1]:
        assert len(commit.logprobs) == len(commit.tokens)


# What is refused


@pytest.mark.parametrize(
    "given",
    [
        PinnedTokens(fixed={0: 5}),
        PinnedTokens(among={0: (5,)}),
        PinnedTokens(begin={0: 5}),
        PinnedTokens(watch={0: (5,)}),
    ],
)
def test_only_a_canvas_can_hold_pins(given: PinnedTokens) -> None:
    with pytest.raises(InputError, match='positions are pinned, and decode is "causal"; only a canvas'):
        answer_of(fresh(), ask(given, max_tokens=4, decode="causal"))


def test_with_pins_the_cheaper_way_to_write_is_a_canvas() -> None:
    answer = answer_of(fresh(), ask(PinnedTokens(fixed={1: 5}), max_tokens=2, decode="auto"))
    assert answer.decode == "diffuse"
    assert answer.tokens[1] == 5


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({8: 5}, r"position 8 is pinned; the answer has positions 0 to 7\."),
        ({-1: [5]}, r"position -1 is pinned"),
        ({True: 5}, r"position True is pinned"),
        ({0: VOCAB}, rf"position 0 is pinned to token {VOCAB}; this vocabulary ends at {VOCAB - 1}\."),
        ({0: [5, -3]}, r"position 0 is pinned to token -3"),
        ({0: []}, r"position 0 has an empty set of tokens"),
        ([5], r"pins\.0 is 5; give an object"),
        ({0: "sea"}, r"the pin of position 0 is 'sea'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_pins_without_a_place_are_refused_before_anything_is_computed(pins: Any, message: str) -> None:
    lm = fresh()
    with pytest.raises(InputError, match=message):
        lm.generate(list(PROMPT), pins=pins, max_tokens=8)
    with pytest.raises(InputError, match=message):
        lm.stream(list(PROMPT), pins=pins, max_tokens=8)
    stats = lm._local_engine._engine.stats()
    assert (stats.slots_used, stats.counters["steps"]) == (0, 0)


def test_without_max_tokens_pins_may_stand_anywhere_in_the_context() -> None:
    lm = fresh()
    room = (CONFIG.max_positions - len(PROMPT)) // CANVAS * CANVAS
    answer = lm.generate(list(PROMPT), pins=fixed_range(0, room), seed=1, ignore_end=True)
    assert answer.tokens == tuple(range(100, 100 + room))
    assert forwards_of(lm) == 0
    with pytest.raises(InputError, match=rf"the answer has positions 0 to {room - 1}\."):
        lm.generate(list(PROMPT), pins={room: 5})


# Deadlines


@pytest.mark.parametrize(
    ("given", "after", "tokens", "provisional"),
    [
        (PinnedTokens(fixed=fixed_range(0, 4)), 0, 0, 0),
        (PinnedTokens(fixed=fixed_range(0, 4)), 2, 8, 8),
        (PinnedTokens(fixed=fixed_range(0, 12)), 1, 8, 0),
        (PinnedTokens(fixed=fixed_range(0, 12)), 3, 16, 8),
        (PinnedTokens(fixed=fixed_range(8, 16)), 6, 8, 0),
        (PinnedTokens(fixed=fixed_range(8, 16)), 7, 16, 0),
        (PinnedTokens(fixed=fixed_range(8, 16), among={18: (3, 4)}), 8, 24, 8),
    ],
    ids=[
        "at once", "in the first canvas", "behind a whole one", "in the second canvas",
        "before a whole one", "behind a whole one in the middle", "in the last canvas",
    ],
)  # fmt: skip
def test_a_deadline_ends_an_answer_with_pins_cleanly(
    given: PinnedTokens, after: int, tokens: int, provisional: int
) -> None:
    """By a clock that stands still between steps: `after` so many the time is up."""
    now = 0.0
    memory = KVCacheManager(full_blocks=20, window_blocks=20, block_size=8, window=CONFIG.window)
    limits = SchedulerConfig(max_num_seqs=2, chunk_size=64, encode_block=ENCODE_BLOCK)
    engine = Engine({None: fresh().transformer}, memory, limits, clock=lambda: now)
    engine.add(engine.validate(ask(given, max_tokens=24, max_denoising_steps=6, deadline_s=10.0, logprobs=1)))
    told: list[Event] = []
    for number in range(99):
        now = 11.0 if number >= after else now + 0.01
        for _, event in engine.step():
            assert not isinstance(event, Failed), event.error
            told.append(event)
        if engine.is_idle:
            break
    answer = told[-1].answer
    assert number == after
    assert answer.finish_reason is FinishReason.DEADLINE
    assert (len(answer.tokens), answer.provisional_tokens) == (tokens, provisional)
    check_kept(answer, given)
    commits = told[:-1]
    assert tuple(token for commit in commits for token in commit.tokens) == answer.tokens
    assert [commit.settled for commit in commits] == [True] * ((tokens - provisional) // CANVAS) + [False] * (
        provisional // CANVAS
    )
    for commit in commits:
        begin = CANVAS * commit.canvas
        assert commit.pinned == tuple(at for at in range(CANVAS) if begin + at in given.fixed)
    assert answer.watched == ()
    stats = engine.stats()
    assert (stats.slots_used, stats.full_blocks_used, stats.window_blocks_used) == (0, 0, 0)


def test_time_is_counted_as_denoising_only_where_something_was_denoised() -> None:
    timings = answer_of(fresh(), ask(PinnedTokens(fixed=fixed_range(0, 16)), max_tokens=16)).timings
    assert timings.denoise_s == 0.0
    assert timings.prefill_s > 0.0
    assert timings.commit_s > 0.0
