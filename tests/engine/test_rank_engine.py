"""Ranks that compute one model together answer as one process does, and never part without a word."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dgemma.checkpoint.load import load_transformer
from dgemma.checkpoint.presets import PRESETS, layers
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.rank_engine import RankEngine
from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Failed
from dgemma.errors import RankError
from dgemma.events import Answer, Finish
from dgemma.model.ranks import ALONE, Ranks
from dgemma.params import GenerationParams
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.response_format import RegexFormat
from dgemma.text.tokenizer import Tokenizer
from sizes import IS_FULL
from thread_ranks import ThreadRanks, on_ranks

WINDOW = 24
CONFIG = replace(
    PRESETS["tiny"].config,
    num_heads=4,
    layers=layers(2, head_dim=16, kv_heads=4, full_head_dim=32, full_kv_heads=2),
    window=WINDOW,
    canvas_len=8,
    vocab_size=9000,
    max_positions=512,
)
NUM_REQUESTS = 50 if IS_FULL else 14
DECODES = ("diffuse", "diffuse", "diffuse", "causal", "lossless", "verified")


PLAIN = EngineRequest(
    prompt=(2, 40, 300), seed=1, params=GenerationParams(max_tokens=8, max_denoising_steps=2)
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSource:
    path: Path = tmp_path_factory.mktemp("model") / "served"
    write_random(path, CONFIG, dtype="F32", seed=1)
    return open_checkpoint(path)


@pytest.fixture(scope="module")
def requests(source: CheckpointSource) -> list[EngineRequest]:
    tokenizer = Tokenizer.from_directory(source.path)
    compiler = GrammarCompiler(tokenizer, CONFIG.vocab_size, (1,))
    formats = [compiler.compile(RegexFormat(regex)) for regex in ("[a-f]{3,9}", "(no|yes)+ [0-9]+")]
    return [random_request(random.Random(number), number, formats) for number in range(NUM_REQUESTS)]


def random_request(rng: random.Random, number: int, formats: list[Any]) -> EngineRequest:
    """Prompts share their beginnings, so that prefixes are reused."""
    shared = random.Random(rng.randrange(3))
    prompt = [shared.randrange(6, 2048) for _ in range(100)][: rng.randrange(100)]
    prompt += [rng.randrange(6, CONFIG.vocab_size) for _ in range(rng.randint(1, 30))]
    decode = rng.choice(DECODES)
    kind = rng.choice(["plain", "plain", "pins", "constraint", "bias"])
    pinned = None
    if kind == "pins":
        decode = "diffuse"
        pinned = PinnedTokens(fixed={3: 700, 9: 6000}, among={1: (17, 900, 5000)}, watch={2: (8, 4321)})
    params = GenerationParams(
        max_tokens=rng.randint(10, 20),
        max_denoising_steps=rng.randint(1, 5),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        decode=decode,
        top_k=rng.choice([None, None, 5]),
        top_p=rng.choice([None, None, 0.8]),
        logprobs=rng.choice([None, None, 2]),
    )
    return EngineRequest(
        prompt=tuple(prompt),
        seed=rng.randrange(1 << 64),
        params=params,
        row=number,
        pinned=pinned,
        constraint=rng.choice(formats) if kind == "constraint" else None,
        logit_bias=((40, 3.0), (8000, 6.0)) if kind == "bias" else (),
        drafts=rng.random() < 0.2,
    )


def engine_of(source: CheckpointSource, ranks: Ranks) -> Engine:
    model = load_transformer(source, dtype=torch.float32, device=torch.device("cpu"), ranks=ranks)
    memory = KVCacheManager(full_blocks=60, window_blocks=80, block_size=16, window=WINDOW)
    limits = SchedulerConfig(max_num_seqs=6, chunk_size=48, encode_block=1)
    kind = Engine if ranks is ALONE else RankEngine
    return kind({None: model}, memory, limits, tokenizer=Tokenizer.from_directory(source.path))


def answer_all(
    engine: Engine, requests: list[EngineRequest], cancelled: Callable[[int], bool]
) -> dict[int, Answer]:
    """Requests come at random times; some are cancelled after two steps."""
    rng, coming = random.Random(3), list(requests)
    answers: dict[int, Answer] = {}
    while coming or not engine.is_idle:
        fresh = []
        while coming and (rng.random() < 0.4 or engine.is_idle):
            one = coming.pop(0)
            number = engine.add(engine.validate(one))
            fresh += [number] if cancelled(one.row) else []
        for _, event in engine.step():
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Finish):
                answers[event.row] = event.answer
        for number in fresh:
            engine.cancel(number)
    return answers


def lead(
    source: CheckpointSource, requests: list[EngineRequest], cancelled: Callable[[int], bool]
) -> Callable[[Ranks], dict[int, Answer]]:
    def run(ranks: Ranks) -> dict[int, Answer]:
        engine = engine_of(source, ranks)
        assert isinstance(engine, RankEngine)
        if not ranks.leads:
            while engine.follow():
                pass
            return {}
        answers = answer_all(engine, requests, cancelled)
        engine.close()
        return answers

    return run


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_answer_mixed_requests_as_one_process(
    source: CheckpointSource, requests: list[EngineRequest], size: int
) -> None:
    def cancelled(row: int) -> bool:
        return row % 9 == 4

    if size > 2 and not IS_FULL:  # more ranks take turns at the same processors
        requests = requests[:9]
    with torch.inference_mode():
        expected = answer_all(engine_of(source, ALONE), requests, cancelled)
    found = on_ranks(size, lead(source, requests, cancelled))[0]
    assert len(found) >= 0.8 * len(requests)
    assert found.keys() == expected.keys()
    for row, answer in found.items():
        assert answer.tokens == expected[row].tokens, row
        assert answer.steps == expected[row].steps
        assert answer.cached_tokens == expected[row].cached_tokens
    assert any(answer.cached_tokens for answer in found.values())


def test_a_rank_with_another_result_ends_the_group(source: CheckpointSource) -> None:
    def run(ranks: Ranks) -> None:
        assert isinstance(ranks, ThreadRanks)
        engine = engine_of(source, ranks)
        if ranks.rank == 1:
            engine._emit = lambda *event: None  # type: ignore[method-assign]
        answer_all(engine, [PLAIN], lambda row: False) if ranks.leads else follow(engine)

    with pytest.raises(RankError, match="has come to another result"):
        on_ranks(2, run)


def follow(engine: Engine) -> None:
    assert isinstance(engine, RankEngine)
    while engine.follow():
        pass


def test_a_rank_that_is_called_otherwise_than_the_first_ends_the_group(
    source: CheckpointSource, requests: list[EngineRequest]
) -> None:
    def run(ranks: Ranks) -> None:
        engine = engine_of(source, ranks)
        engine.add(engine.validate(requests[0]))
        if not ranks.leads:
            engine.cancel(0)
        engine.step()

    with pytest.raises(RankError, match="was called otherwise than the first"):
        on_ranks(2, run)


def test_ranks_of_one_program_answer_with_the_seeds_of_the_first(
    source: CheckpointSource, requests: list[EngineRequest]
) -> None:
    """Where none is given each draws another."""

    def run(ranks: Ranks) -> dict[int, Answer]:
        engine = engine_of(source, ranks)
        own = [replace(request, seed=request.seed + ranks.rank) for request in requests[:3]]
        return answer_all(engine, own, lambda row: False)

    first, second = on_ranks(2, run)
    assert len(first) == 3
    assert {row: answer.tokens for row, answer in first.items()} == {
        row: answer.tokens for row, answer in second.items()
    }


class Lonely(Ranks):
    """The second of two, whose first is gone."""

    rank, size = 1, 2

    def share(self, message: Any) -> Any:
        if isinstance(message, dict):  # as the engine is made
            return message
        raise RankError("rank 1 of 2 lost the others")


def test_a_rank_with_nothing_to_do_ends_quietly_with_the_first(
    source: CheckpointSource, requests: list[EngineRequest]
) -> None:
    engine = engine_of(source, Lonely())
    assert isinstance(engine, RankEngine)
    assert not engine.follow()
    engine.add(engine.validate(requests[0]))
    with pytest.raises(RankError, match="lost the others"):
        engine.follow()
