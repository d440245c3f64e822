"""How likely a given text is, through the engine: the same as the causal door says, whatever is cached."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.checkpoint.load import place
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.random_weights import distribution
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.local import BLOCK_SIZE
from dgemma.engine.request import EngineRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Failed
from dgemma.errors import InputError
from dgemma.evaluation.likelihood import TokenPair, log_likelihoods
from dgemma.events import Answer, Commit, Finish, FinishReason
from dgemma.language_model import LanguageModel
from dgemma.model.execution import Execution
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from engine_life import CONFIG, ENCODE_BLOCK
from sizes import cases

LONGEST = 272
VOCAB = 101  # no multiple of anything a kernel likes


@cache
def _stack() -> Transformer:
    config = replace(CONFIG, vocab_size=VOCAB, max_positions=LONGEST)
    execution = Execution(exact=True, encode_block=ENCODE_BLOCK, expert_tile=4)
    stack = Transformer(config, dtype=torch.float32, device="cpu", execution=execution)
    generator = torch.Generator().manual_seed(2)
    for spec in tensor_specs(config):
        mean, spread = distribution(spec)
        place(stack, spec.path, torch.randn(spec.shape, generator=generator) * spread + mean)
    return stack


def fresh(*, exact: bool = True) -> LanguageModel:
    """A handle that remembers nothing yet."""
    return LanguageModel(_stack()).exact(exact)


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(length))


def score(prompt: Sequence[int], score_from: int, **options: Any) -> EngineRequest:
    return EngineRequest(
        prompt=tuple(prompt), seed=0, params=GenerationParams(**options), score_from=score_from
    )


def write(prompt: Sequence[int], seed: int = 1, **options: Any) -> EngineRequest:
    params = GenerationParams(**{"max_tokens": 6, "max_denoising_steps": 2, "ignore_end": True, **options})
    return EngineRequest(prompt=tuple(prompt), seed=seed, params=params)


def answer_of(lm: LanguageModel, request: EngineRequest) -> Answer:
    (answer,) = lm._ask([request])
    return answer


@torch.inference_mode()
def dense_scores(lm: LanguageModel, prompt: Sequence[int], score_from: int) -> list[float]:
    """Every log-probability of every token, in fp64, and of these the ones asked for."""
    hidden = lm.encode(torch.tensor([tuple(prompt)]), lm.new_cache(1))
    log_probs = lm.logits(hidden)[0].double().log_softmax(-1)
    return [float(log_probs[at - 1, prompt[at]]) for at in range(score_from, len(prompt))]


# Around blocks, blocks of encoding, and blocks of scoring.
LENGTHS = (2, 3, 8, 9, 31, 32, 33, 63, 64, 65, 66, 96, 127, 128, 129, 200, LONGEST)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "default"])
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_are_those_of_the_causal_pass(length: int, exact: bool) -> None:
    lm = fresh(exact=exact)
    prompt = text(length, seed=length)
    splits = sorted({1, 2, length // 2, min(64, length - 1), length - 2, length - 1} - {0, length})
    answers = lm._ask([score(prompt, split) for split in splits])
    pairs = [TokenPair(prompt[:split], prompt[split:]) for split in splits]
    likelihoods = dict(log_likelihoods(lm, pairs, batch=3))
    every = dense_scores(lm, prompt, 1)
    for number, (split, answer) in enumerate(zip(splits, answers, strict=True)):
        assert len(answer.scores) == length - split
        assert answer.scores == pytest.approx(every[split - 1 :], abs=1e-4)
        assert sum(answer.scores) == pytest.approx(likelihoods[number].log_prob, rel=1e-6, abs=1e-4)
    assert len({round(value, 3) for value in every}) > len(every) // 2, "they differ from each other"


def test_nothing_is_written() -> None:
    lm = fresh()
    request = score(text(40), 10, max_tokens=1000, logprobs=2)
    events = list(lm._local_engine.run([request]))
    assert [type(event) for event in events] == [Finish]
    answer = events[0].answer
    assert (answer.tokens, answer.text, answer.steps, answer.pinned) == ((), "", (), ())
    assert (answer.finish_reason, answer.decode) == (FinishReason.STOP, "score")
    assert (answer.prompt_tokens, answer.cached_tokens, len(answer.scores)) == (40, 0, 30)
    stats = lm._local_engine._engine.stats()
    assert (stats.counters["denoise_forwards"], stats.counters["prefill_tokens"]) == (0, 40)
    assert (stats.slots_used, stats.full_blocks_used, stats.window_blocks_used) == (0, 0, 0)


def test_an_answer_that_was_written_has_no_scores() -> None:
    assert answer_of(fresh(), write(text(9))).scores == ()


# What is cached


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "default"])
def test_a_prefix_that_was_read_is_not_read_again_and_changes_no_score(exact: bool) -> None:
    lm = fresh(exact=exact)
    prompt = text(150, seed=3)
    first = answer_of(lm, score(prompt, 100))
    assert first.cached_tokens == 0
    for split in (100, 97, 96, 140, 149, 33, 32, 5):
        again = answer_of(lm, score(prompt, split))
        # What stands before the first scored token is needed for it, so at most all before that.
        assert again.cached_tokens <= split - 1
        assert again.cached_tokens % BLOCK_SIZE == 0
        truth = dense_scores(lm, prompt, split)
        assert again.scores == pytest.approx(truth, abs=1e-4)
        if exact:
            assert again.scores == answer_of(fresh(), score(prompt, split)).scores
            assert again.scores[-1:] == first.scores[-1:]
    assert answer_of(lm, score(prompt, 140)).cached_tokens >= 2 * BLOCK_SIZE


def test_two_endings_of_one_text_share_what_stands_before_them() -> None:
    lm = fresh()
    shared = text(130, seed=4)
    endings = [text(length, seed=length) for length in (1, 7, 30, 64)]
    lm._ask([write(shared)])
    answers = lm._ask([score((*shared, *ending), len(shared)) for ending in endings])
    for ending, answer in zip(endings, answers, strict=True):
        assert answer.cached_tokens == len(shared) // BLOCK_SIZE * BLOCK_SIZE
        alone = answer_of(fresh(), score((*shared, *ending), len(shared)))
        assert alone.cached_tokens == 0
        assert answer.scores == alone.scores


def test_what_was_scored_serves_a_writer_and_changes_nothing_of_its_answer() -> None:
    lm = fresh()
    prompt = text(100, seed=5)
    answer_of(lm, score(prompt, 20))
    answer = answer_of(lm, write(prompt))
    assert answer.cached_tokens == 96
    assert answer.tokens == answer_of(fresh(), write(prompt)).tokens


# In company


def life_of(
    requests: Sequence[EngineRequest], *, chunk_size: int, block_size: int = 8, slots: int = 3, seed: int = 0
) -> dict[int, Answer]:
    """Through one engine, prompts in chunks; some come later than others."""
    rng = random.Random(seed)
    memory = KVCacheManager(full_blocks=120, window_blocks=60, block_size=block_size, window=CONFIG.window)
    engine = Engine(
        {None: _stack()},
        memory,
        SchedulerConfig(max_num_seqs=slots, chunk_size=chunk_size, encode_block=ENCODE_BLOCK),
    )
    coming = [replace(one, row=row) for row, one in enumerate(requests)]
    answers: dict[int, Answer] = {}
    while coming or not engine.is_idle:
        while coming and (engine.is_idle or rng.random() < 0.5):
            engine.add(engine.validate(coming.pop(0)))
        for _, event in engine.step():
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Finish):
                answers[event.row] = event.answer
    stats = engine.stats()
    assert (stats.slots_used, stats.full_blocks_used, stats.window_blocks_used) == (0, 0, 0)
    return answers


@pytest.mark.parametrize("chunk_size", [8, 24, 64, 1024])
def test_scores_do_not_depend_on_how_a_text_was_cut(chunk_size: int) -> None:
    requests = [score(text(150, seed=6), split) for split in (1, 64, 65, 149)]
    for request in requests:
        (answer,) = life_of([request], chunk_size=chunk_size).values()
        assert answer.scores == whole(request.prompt, request.score_from or 0)


@cache
def whole(prompt: tuple[int, ...], score_from: int) -> tuple[float, ...]:
    """Scores of a text that nobody shares anything with."""
    return answer_of(fresh(), score(prompt, score_from)).scores


@cache
def written(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    return answer_of(fresh(), write(prompt, seed)).tokens


def test_a_token_has_the_score_it_has_in_a_longer_text() -> None:
    """Asked for alone it is a product of one row, which another kernel computes."""
    prompt = text(90, seed=8)
    ends = range(2, 91, 2)
    answers = fresh()._ask([score(prompt[:end], end - 1) for end in ends])
    every = whole(prompt, 1)
    assert [answer.scores for answer in answers] == [(every[end - 2],) for end in ends]


QUESTIONS = 14


def question(number: int) -> EngineRequest:
    """One of a few texts that begin alike, to be scored or to be continued."""
    rng = random.Random(f"scored question {number}")
    prompt = text(100, seed=rng.randrange(2))[: rng.randint(1, 100)] + text(rng.randint(1, 20), seed=number)
    if number % 3 == 0:
        return write(prompt, seed=number)
    return score(prompt, rng.choice((1, len(prompt) - 1, rng.randint(1, len(prompt) - 1))))


@given(
    numbers=st.lists(st.integers(0, QUESTIONS - 1), min_size=2, max_size=6),
    chunk_size=st.sampled_from([8, 32, 256]),
    block_size=st.sampled_from([4, 8, 32]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=cases(25, 12), deadline=None, derandomize=True, database=None)
def test_in_the_exact_way_no_bit_of_a_score_depends_on_cache_or_company(
    numbers: list[int], chunk_size: int, block_size: int, seed: int
) -> None:
    requests = [question(number) for number in numbers]
    answers = life_of(requests, chunk_size=chunk_size, block_size=block_size, slots=2 + seed % 3, seed=seed)
    for row, request in enumerate(requests):
        if request.score_from is None:
            assert answers[row].tokens == written(request.prompt, request.seed)
            assert answers[row].scores == ()
        else:
            assert answers[row].scores == whole(request.prompt, request.score_from)


def test_by_default_scores_in_company_are_the_same_up_to_rounding() -> None:
    lm = fresh(exact=False)
    requests = [question(number) for number in range(QUESTIONS)]
    for request, answer in zip(requests, lm._ask(requests), strict=True):
        if request.score_from is None:
            assert len(answer.tokens) == 6
        else:
            truth = dense_scores(fresh(), request.prompt, request.score_from)
            assert answer.scores == pytest.approx(truth, abs=1e-4)


# What is refused


@pytest.mark.parametrize(("length", "score_from"), [(10, 0), (10, -1), (10, 11), (1, 0), (1, 2)], ids=str)
def test_a_scored_token_has_a_context(length: int, score_from: int) -> None:
    lm = fresh()
    with pytest.raises(InputError, match=f"score_from is {score_from} for a prompt of {length} tokens"):
        answer_of(lm, score(text(length), score_from))


def test_a_text_longer_than_the_context_is_refused() -> None:
    lm = fresh()
    with pytest.raises(InputError, match=f"the text has {LONGEST + 1} tokens; .* holds {LONGEST}"):
        answer_of(lm, score(text(LONGEST + 1), 5))
    assert len(answer_of(lm, score(text(LONGEST), 5)).scores) == LONGEST - 5


def test_a_text_of_words_that_do_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match=f"the prompt holds token {VOCAB}; this vocabulary ends"):
        answer_of(fresh(), score((5, VOCAB), 1))
    with pytest.raises(InputError, match="the prompt is empty"):
        answer_of(fresh(), score((), 1))


def test_a_refused_request_fails_no_other() -> None:
    lm = fresh()
    with pytest.raises(InputError):
        lm._ask([score(text(20), 4), score(text(20), 0)])
    assert lm._local_engine._engine.is_idle
    assert answer_of(lm, score(text(20), 4)).scores == whole(text(20), 4)


@pytest.mark.parametrize("after", [0, 2])
def test_a_deadline_ends_a_scoring_with_what_was_found(after: int) -> None:
    now = 0.0
    memory = KVCacheManager(full_blocks=40, window_blocks=20, block_size=8, window=CONFIG.window)
    engine = Engine(
        {None: _stack()},
        memory,
        SchedulerConfig(max_num_seqs=1, chunk_size=16, encode_block=ENCODE_BLOCK),
        clock=lambda: now,
    )
    prompt = text(80, seed=7)
    engine.add(engine.validate(score(prompt, 10, deadline_s=5.0)))
    told = []
    for number in range(after + 1):
        now = 6.0 if number == after else now
        told += [event for _, event in engine.step()]
    assert not any(isinstance(event, Commit | Failed) for event in told)
    answer = told[-1].answer
    assert answer.finish_reason is FinishReason.DEADLINE
    assert answer.scores == whole(prompt, 10)[: len(answer.scores)]
    assert len(answer.scores) == max(0, 16 * after - 9)
    assert engine.is_idle
    assert engine.stats().slots_used == 0
