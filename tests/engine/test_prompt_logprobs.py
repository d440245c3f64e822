"""Log-probabilities of a prompt beside its answer: those of the causal pass, whatever is cached or cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.events import Answer, Commit, Finish, PromptScored, ScoredToken
from dgemma.language_model import LanguageModel
from dgemma.params import MAX_LOGPROBS
from engine.test_scoring import answer_of, fresh, life_of, score, text, write
from oracle import CASES, Case, encoder_logits, make_oracle, make_ours, tokens
from sizes import cases


@torch.inference_mode()
def dense(lm: LanguageModel, prompt: Sequence[int]) -> torch.Tensor:
    """Every log-probability after each token of the prompt [tokens, vocabulary], in fp64."""
    hidden = lm.encode(torch.tensor([tuple(prompt)]), lm.new_cache(1))
    return lm.logits(hidden)[0].double().log_softmax(-1)


def check(found: Sequence[ScoredToken], truth: torch.Tensor, prompt: Sequence[int], num_top: int) -> None:
    assert [each.token for each in found] == list(prompt[1:])
    for each, row in zip(found, truth, strict=False):
        assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-4)
        above = int((row > row[each.token] + 1e-4).sum()), int((row > row[each.token] - 1e-4).sum())
        assert above[0] + 1 <= each.rank <= max(above[1], 1)
        best = row.topk(num_top).values.tolist()
        assert [value for _, value in each.top] == pytest.approx(best, abs=1e-4)
        assert [float(row[token]) for token, _ in each.top] == pytest.approx(best, abs=1e-4)
        if each.rank == 1 and each.top:
            assert each.logprob == each.top[0][1], "a client tells by equality that it is the likeliest"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "default"])
@pytest.mark.parametrize("length", [1, 2, 33, 64, 65, 130])
def test_they_are_those_of_the_causal_pass_and_change_nothing_of_the_answer(length: int, exact: bool) -> None:
    lm, prompt = fresh(exact=exact), text(length, seed=length)
    request = replace(write(prompt), prompt_logprobs=3)
    events = list(lm._local_engine.run([request]))
    assert [type(event) for event in events if not isinstance(event, Commit)] == [PromptScored, Finish]
    answer = answer_of(fresh(exact=exact), request)
    assert isinstance(events[0], PromptScored)
    assert answer.prompt_logprobs == events[0].logprobs
    check(answer.prompt_logprobs, dense(lm, prompt), prompt, 3)
    plain = answer_of(fresh(exact=exact), write(prompt))
    assert answer.tokens == plain.tokens
    assert (plain.prompt_logprobs, answer.scores) == (None, ())


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
@torch.no_grad()
def test_they_are_the_oracles(case: Case) -> None:
    oracle = make_oracle(case)
    lm = make_ours(oracle)
    prompt = tokens(case, 1, 40, seed=1)
    hidden = oracle.model.encoder(input_ids=prompt).last_hidden_state
    truth = encoder_logits(oracle, hidden)[0].float().log_softmax(-1)
    ids = tuple(prompt[0].tolist())
    request = replace(score(ids, 1), prompt_logprobs=2)
    found = answer_of(lm, request).prompt_logprobs
    assert found is not None
    ours = torch.tensor([each.logprob for each in found])
    theirs = truth[torch.arange(len(ids) - 1), prompt[0, 1:]]
    assert float((ours - theirs).abs().max()) < 1e-4
    best = torch.tensor([[value for _, value in each.top] for each in found])
    assert float((best - truth[:-1].topk(2).values).abs().max()) < 1e-4
    assert len({each.rank for each in found}) > 5, "they differ from each other"


def test_a_prefix_that_was_read_is_read_again() -> None:
    lm, prompt = fresh(), text(150, seed=3)
    answer_of(lm, write(prompt))
    for request in (replace(write(prompt), prompt_logprobs=1), replace(score(prompt, 1), prompt_logprobs=1)):
        again = answer_of(lm, request)
        assert again.cached_tokens == 0
        assert again.prompt_logprobs == answer_of(fresh(), request).prompt_logprobs
    # What was read for its scores serves others.
    assert answer_of(lm, write(prompt)).cached_tokens == 128


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    chunk_size=st.sampled_from([8, 24, 256]),
    num_top=st.integers(0, MAX_LOGPROBS),
    seed=st.integers(0, 1000),
)
@settings(max_examples=cases(25, 3), deadline=None, derandomize=True, database=None)
def test_in_the_exact_way_no_bit_depends_on_chunks_or_company(
    lengths: list[int], chunk_size: int, num_top: int, seed: int
) -> None:
    """Answers of several canvases: what is committed is not scored."""
    requests = [
        replace(write(text(length, seed=length), max_tokens=20), prompt_logprobs=num_top if at % 3 else None)
        for at, length in enumerate(lengths, start=seed)
    ]
    answers = life_of(requests, chunk_size=chunk_size, slots=2, seed=seed)
    for row, request in enumerate(requests):
        alone: Answer = answer_of(fresh(), request)
        assert answers[row].tokens == alone.tokens
        assert answers[row].prompt_logprobs == alone.prompt_logprobs
        if request.prompt_logprobs is not None:
            assert len(alone.prompt_logprobs or ()) == len(request.prompt) - 1


@pytest.mark.parametrize("decode", ["causal", "lossless", "verified", "auto"])
def test_every_way_of_decoding_has_them(decode: str) -> None:
    request = replace(write(text(40), decode=decode, max_tokens=12), prompt_logprobs=0)
    answer = answer_of(fresh(), request)
    check(answer.prompt_logprobs or (), dense(fresh(), request.prompt), request.prompt, 0)
    assert len(answer.tokens) == 12


def test_a_request_that_scores_from_its_end_on_only_reads() -> None:
    lm, prompt = fresh(), text(70)
    answer = answer_of(lm, score(prompt, 70))
    assert (answer.tokens, answer.scores, answer.prompt_logprobs) == ((), (), None)
    assert answer_of(lm, write(prompt)).cached_tokens == 64
    single = answer_of(fresh(), replace(score((5,), 1), prompt_logprobs=2))
    assert single.prompt_logprobs == ()


@pytest.mark.parametrize("number", [-1, MAX_LOGPROBS + 1])
def test_a_number_of_tokens_that_cannot_be_listed_is_refused(number: int) -> None:
    with pytest.raises(InputError, match=f"prompt_logprobs is {number}; it must be from 0 to"):
        answer_of(fresh(), replace(write(text(9)), prompt_logprobs=number))
