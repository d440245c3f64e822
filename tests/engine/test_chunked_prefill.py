"""A prompt read in chunks is the prompt read whole: windows end where they should, whatever was cut where."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.request import EngineRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Failed
from dgemma.events import Answer, Finish
from dgemma.language_model import LanguageModel
from dgemma.model.execution import Execution
from dgemma.params import GenerationParams
from oracle import FULL, SLIDING, Case, calm_oracle, make_ours
from plain_answer import plain_answer

WINDOW = 40
GEOMETRY = Case(
    "needle",
    text={
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "sliding_window": WINDOW,
        "max_position_embeddings": 1024,
    },
)
LENGTH = 300
PARAMS = GenerationParams(max_tokens=20, max_denoising_steps=2, ignore_end=True, logprobs=5)


@cache
def model(exact: bool, one_expert: bool = False) -> LanguageModel:
    case = Case(GEOMETRY.name, GEOMETRY.text, one_expert=one_expert)
    return make_ours(calm_oracle(case), execution=Execution(exact=exact))


def prompt() -> list[int]:
    return torch.randint(6, 96, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


def ask(lm: LanguageModel, prompts: list[list[int]], *, chunk_size: int, block_size: int) -> list[Answer]:
    memory = KVCacheManager(full_blocks=800, window_blocks=800, block_size=block_size, window=WINDOW)
    engine = Engine(
        {None: lm.transformer},
        memory,
        SchedulerConfig(max_num_seqs=2, chunk_size=chunk_size, encode_block=64),
    )
    for row, tokens in enumerate(prompts):
        engine.add(engine.validate(EngineRequest(prompt=tuple(tokens), seed=1, params=PARAMS, row=row)))
    answers: dict[int, Answer] = {}
    while not engine.is_idle:
        for _, event in engine.step():
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Finish):
                answers[event.row] = event.answer
    return [answers[row] for row in range(len(prompts))]


@pytest.mark.parametrize("block_size", [8, 32, 48])
@pytest.mark.parametrize("chunk_size", [64, 128, 1024])
def test_chunks_and_blocks_of_any_size_give_the_same_numbers(chunk_size: int, block_size: int) -> None:
    whole = plain_answer(model(exact=True), tuple(prompt()), seed=1, params=PARAMS)
    for answer in ask(
        model(exact=True), [prompt(), prompt()[:-1]], chunk_size=chunk_size, block_size=block_size
    )[:1]:
        assert answer.tokens == whole.tokens
        assert answer.logprobs == whole.logprobs, "to the last bit"


@pytest.mark.parametrize("chunk_size", [64, 1024])
def test_by_default_chunks_give_the_same_numbers_up_to_rounding(chunk_size: int) -> None:
    whole = plain_answer(model(exact=True), tuple(prompt()), seed=1, params=PARAMS)
    (answer,) = ask(model(exact=False), [prompt()], chunk_size=chunk_size, block_size=32)
    assert answer.tokens == whole.tokens
    theirs, ours = (
        torch.tensor([[p for _, p in words] for words in a.logprobs or ()]) for a in (whole, answer)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def past_of(lm: LanguageModel, tokens: list[int], chunk_size: int) -> Any:
    """What the first canvas of an answer reads."""
    memory = KVCacheManager(full_blocks=80, window_blocks=80, block_size=16, window=WINDOW)
    engine = Engine(
        {None: lm.transformer},
        memory,
        SchedulerConfig(max_num_seqs=1, chunk_size=chunk_size, encode_block=64),
    )
    number = engine.add(engine.validate(EngineRequest(prompt=tuple(tokens), seed=1, params=PARAMS)))
    while engine._sequences[number].past is None:
        engine.step()
    return engine._sequences[number].past


@pytest.mark.parametrize("chunk_size", [64, 1024])
def test_a_needle_is_seen_to_the_windows_last_token_and_not_beyond(chunk_size: int) -> None:
    """The first layer slides: a canvas sees its last WINDOW - 1 keys, each made of its own token alone."""
    lm = model(exact=True)
    clean = past_of(lm, prompt(), chunk_size)
    assert clean.keys[0].shape[0] == WINDOW - 1 + lm.config.canvas_len
    for distance, changed in ((WINDOW, []), (WINDOW - 1, [0]), (1, [WINDOW - 2])):
        tokens = prompt()
        tokens[LENGTH - distance] = 95 if tokens[LENGTH - distance] != 95 else 94
        keys = past_of(lm, tokens, chunk_size).keys[0][: WINDOW - 1]
        different = (keys != clean.keys[0][: WINDOW - 1]).flatten(1).any(1).nonzero().flatten().tolist()
        assert different == changed, f"a needle {distance} tokens before the canvas"


@pytest.mark.parametrize("exact", [True, False])
def test_all_tokens_to_one_expert_is_slow_and_not_wrong(exact: bool) -> None:
    lm = model(exact=exact, one_expert=True)
    whole = plain_answer(model(exact=True, one_expert=True), tuple(prompt()), seed=1, params=PARAMS)
    for answer in ask(lm, [prompt(), prompt()], chunk_size=128, block_size=32):
        assert answer.tokens == whole.tokens
