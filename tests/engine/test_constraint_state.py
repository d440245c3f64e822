"""Answers that keep to a language: whole, in time, across canvases, and the same in any company."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dgemma
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.errors import InputError
from dgemma.events import Answer, FinishReason
from dgemma.language_model import LanguageModel
from dgemma.params import GenerationParams
from dgemma.structured_output.constraint import Constraint
from languages import matching

CANVAS = 8
PATTERNS = [
    r"yes|no|perhaps",
    r"[a-z]{3,40}",
    r'\{"name": "[^"\\]{0,12}", "age": \d{1,3}\}',
    r"(\d\d:\d\d:\d\d ){2,9}end",
    r"[äöü€😀]{1,9}",
    r".*",
    r"(?:ab|abc|b)*c{17}",
]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    path = tmp_path_factory.mktemp("model") / "tiny"
    config = replace(PRESETS["tiny"].config, canvas_len=CANVAS)
    write_random(path, config, dtype="F32", seed=1)
    return dgemma.load(Path(path), exact=True)


def keeping(lm: LanguageModel, pattern: str) -> Constraint:
    return matching(pattern, lm.tokenizer, lm.config.vocab_size)


def request(lm: LanguageModel, constraint: Constraint | None, seed: int = 0, **options: Any) -> EngineRequest:
    pinned = options.pop("pinned", None)
    params = GenerationParams.make(
        lm.generation_defaults, **{"max_denoising_steps": 3, "end_tokens": (1, 106), **options}
    )
    prompt = tuple(range(6, 20 + seed % 5))
    return EngineRequest(prompt=prompt, seed=seed, params=params, pinned=pinned, constraint=constraint)


def ask(lm: LanguageModel, requests: list[EngineRequest]) -> list[Answer]:
    return lm._ask(requests)


@pytest.mark.parametrize("decode", ["diffuse", "causal"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_answer_is_a_whole_text_of_the_language(lm: LanguageModel, pattern: str, decode: str) -> None:
    constraint = keeping(lm, pattern)
    shortest = max(1, int(constraint.token_dfa.distance[0]))
    lengths = [shortest, shortest + 1, shortest + CANVAS, shortest + 3 * CANVAS]
    asked = [
        request(lm, constraint, seed, max_tokens=length, decode=decode, temperature=heat)
        for seed, length in enumerate(lengths)
        for heat in (0.0, 1.0)
    ]
    for one, answer in zip(asked, ask(lm, asked), strict=True):
        assert re.fullmatch(pattern, answer.text), answer.text
        assert len(answer.tokens) <= (one.params.max_tokens or 0)
        assert answer.finish_reason is FinishReason.STOP


def test_an_answer_is_the_same_in_any_company(lm: LanguageModel) -> None:
    first, second = keeping(lm, PATTERNS[2]), keeping(lm, PATTERNS[3])
    asked = [
        request(
            lm, (first, second, None)[seed % 3], seed, max_tokens=40, logprobs=2, top_p=(None, 0.9)[seed % 2]
        )
        for seed in range(9)
    ]
    together = ask(lm, asked)
    for one, answer in zip(asked, together, strict=True):
        alone = ask(lm, [one])[0]
        assert (alone.tokens, alone.text, alone.steps, alone.logprobs) == (
            answer.tokens,
            answer.text,
            answer.steps,
            answer.logprobs,
        )
    assert len({answer.text for answer in together}) == len(together)


def test_too_few_tokens_for_any_text_are_refused_before_running(lm: LanguageModel) -> None:
    constraint = keeping(lm, r"[0-9]{30}")
    least = int(constraint.token_dfa.distance[0])
    with pytest.raises(
        InputError, match=f"max_tokens is {least - 1}; the shortest text .* has {least} tokens"
    ):
        ask(lm, [request(lm, constraint, max_tokens=least - 1)])
    assert re.fullmatch("[0-9]{30}", ask(lm, [request(lm, constraint, max_tokens=least)])[0].text)


def test_a_text_that_fills_all_its_tokens_is_not_called_cut_off(lm: LanguageModel) -> None:
    answer = ask(lm, [request(lm, keeping(lm, "(?:ab)*"), max_tokens=CANVAS + 3, ignore_end=False, seed=3)])[
        0
    ]
    assert answer.finish_reason is FinishReason.STOP


def test_pins_and_a_language_hold_together(lm: LanguageModel) -> None:
    constraint = keeping(lm, r"[a-z ]{20,200}")
    token, other = lm.tokenizer.encode("q")[0], lm.tokenizer.encode("z")[0]
    pins = {3: token, CANVAS + 2: token, 2 * CANVAS + 1: token}
    given = PinnedTokens(fixed=pins, among={5: (token, other)})
    asked = [request(lm, constraint, seed, max_tokens=60, pinned=given) for seed in range(4)]
    for answer in ask(lm, asked):
        assert re.fullmatch(r"[a-z ]{20,200}", answer.text)
        assert all(answer.tokens[at] == word for at, word in pins.items())
        assert answer.tokens[5] in (token, other)


def test_pins_that_leave_no_text_are_refused(lm: LanguageModel) -> None:
    given = PinnedTokens(fixed={2: lm.tokenizer.encode("7")[0]})
    with pytest.raises(InputError, match="both the constraint and the pins"):
        ask(lm, [request(lm, keeping(lm, "[a-z]{20}"), max_tokens=60, pinned=given)])


def test_a_part_with_known_ends_is_exactly_as_long(lm: LanguageModel) -> None:
    whole = matching("[a-z]{1,30}", lm.tokenizer, lm.config.vocab_size, end_tokens=())
    fixed = {at: 50 for at in range(2 * CANVAS) if not 3 <= at < 12}
    part = replace(whole, begin=3, end=12)
    answer = ask(lm, [request(lm, part, max_tokens=2 * CANVAS, pinned=PinnedTokens(fixed=fixed))])[0]
    assert re.fullmatch("[a-z]{1,30}", lm.tokenizer.decode(answer.tokens[3:12]))
    assert all(answer.tokens[at] == word for at, word in fixed.items())
    few = replace(matching("a{2}", lm.tokenizer, lm.config.vocab_size, end_tokens=()), begin=3, end=12)
    with pytest.raises(InputError, match="exactly 9 tokens"):
        ask(lm, [request(lm, few, max_tokens=2 * CANVAS, pinned=PinnedTokens(fixed=fixed))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begin": 2}, "every position outside the constraint"),
        ({"end": 99}, "covers positions 0 to 99 of 20"),
        ({"end_tokens": (7,)}, "needs an end token"),
    ],
)
def test_a_constraint_that_does_not_fit_its_request_is_refused(
    lm: LanguageModel, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ask(lm, [request(lm, replace(keeping(lm, "a+"), **change), max_tokens=20)])


def test_a_constraint_of_another_vocabulary_is_refused(lm: LanguageModel) -> None:
    other = matching("a+", lm.tokenizer, lm.config.vocab_size + 1)
    with pytest.raises(InputError, match="compiled for 2049 tokens"):
        ask(lm, [request(lm, other, max_tokens=20)])


def test_an_end_token_that_is_ignored_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="ignore_end"):
        ask(lm, [request(lm, keeping(lm, "a+"), max_tokens=20, ignore_end=True)])
