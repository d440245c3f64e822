"""canvas_len "auto": as many positions as the answer can need, and fewer once the rest is end tokens.

The text depends on the request alone, whatever lengths share its batch, and equals that of the plain twin.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from adapters import SETTINGS, train
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.sequence import SequenceState
from dgemma.engine.service import Failed
from dgemma.events import Answer, CanvasStep, Finish
from dgemma.language_model import LanguageModel
from dgemma.model.execution import Execution
from dgemma.params import GenerationParams
from dgemma.sampling.sampler import CanvasState, LeftOut, StableAndConfident
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.response_format import ChoiceFormat, RegexFormat, ResponseFormat
from engine_life import CONFIG, tiny_models, tokenizer
from oracle import FULL, SLIDING, Case, calm_oracle, make_ours
from plain_answer import plain_answer
from sizes import cases

NUM_REQUESTS = cases(300, 30)
WHOLE = 32
GEOMETRY = Case(
    "long canvases",
    text={"vocab_size": 256, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 24,
          "max_position_embeddings": 160},
    canvas_len=WHOLE,
)  # fmt: skip


@cache
def models() -> dict[str | None, LanguageModel]:
    base = make_ours(calm_oracle(GEOMETRY), execution=Execution(exact=True))
    return {None: base, "poems": train(base.with_adapter(SETTINGS), seed=1)}


def run(
    lms: dict[str | None, LanguageModel], requests: list[EngineRequest], *, seats: int = 6
) -> tuple[dict[int, Answer], list[CanvasStep]]:
    memory = KVCacheManager(full_blocks=90, window_blocks=90, block_size=16, window=CONFIG.window)
    if lms is not tiny_models():
        memory = KVCacheManager(full_blocks=90, window_blocks=90, block_size=16, window=24)
    limits = SchedulerConfig(max_num_seqs=seats, chunk_size=64, encode_block=64)
    stacks = {name: lm.transformer for name, lm in lms.items()}
    engine = Engine(stacks, memory, limits, tokenizer=tokenizer() if lms is tiny_models() else None)
    waiting, answers, steps = list(requests), {}, []
    while waiting or not engine.is_idle:
        if waiting:
            engine.add(engine.validate(waiting.pop(0)))
        for _, event in engine.step():
            assert not isinstance(event, Failed), event.error
            if isinstance(event, CanvasStep):
                steps.append(event)
            if isinstance(event, Finish):
                answers[event.row] = event.answer
    stats = engine.stats()
    assert (stats.slots_used, stats.full_blocks_used, stats.window_blocks_used) == (0, 0, 0)
    return answers, steps


def random_request(number: int, rng: random.Random) -> EngineRequest:
    params = GenerationParams(
        max_tokens=rng.randint(1, 90),
        canvas_len=rng.choice(("auto", "auto", "auto", None, rng.randint(1, WHOLE))),
        max_denoising_steps=rng.randint(2, 9),
        # Most tokens end an answer, so that canvases end in them.
        end_tokens=tuple(range(256)[rng.choice((0, 1)) :: rng.choice((1, 1, 2, 9))]),
        acceptance=rng.choice(("entropy_bound", "fixed")),
        entropy_bound=rng.choice((1.0, 200.0)),
        logprobs=rng.choice((None, 2)),
        ignore_end=rng.random() < 0.1,
    )
    prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, 60)))
    return EngineRequest(
        prompt=prompt,
        seed=rng.randrange(1 << 32),
        params=params,
        row=number,
        adapter=rng.choice((None, "poems")),
    )


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each cut shortened a canvas."""
    found: list[int] = []
    plain = SequenceState.cut_canvas

    def cut(self: SequenceState, state: CanvasState) -> bool:
        before = self.canvas_len
        is_shorter = plain(self, state)
        assert is_shorter == (self.canvas_len < before)
        if is_shorter:
            found.append(before - self.canvas_len)
        return is_shorter

    monkeypatch.setattr(SequenceState, "cut_canvas", cut)
    return found


def test_a_request_in_mixed_company_is_the_same_as_alone(cuts: list[int]) -> None:
    rng = random.Random(0)
    requests = [random_request(number, rng) for number in range(NUM_REQUESTS)]
    answers, _ = run(models(), requests)
    assert len(cuts) > NUM_REQUESTS / 20, "canvases were cut"
    for request in requests:
        alone = plain_answer(
            models()[request.adapter], request.prompt, seed=request.seed, params=request.params
        )
        found = answers[request.row]
        assert (found.tokens, found.steps, found.logprobs) == (alone.tokens, alone.steps, alone.logprobs)


def test_an_answer_may_fill_the_context_to_its_last_position() -> None:
    request = EngineRequest(
        prompt=(5,) * 150, seed=1, params=GenerationParams(canvas_len="auto", ignore_end=True)
    )
    answers, _ = run(models(), [request])
    assert len(answers[0].tokens) == 10


def traced(**options: Any) -> tuple[Answer, list[CanvasStep]]:
    params = GenerationParams(canvas_len="auto", max_denoising_steps=6, **options)
    answers, steps = run(models(), [EngineRequest(prompt=(5, 7, 9), seed=3, params=params, trace=True)])
    return answers[0], steps


def test_a_canvas_is_no_longer_than_max_tokens_need() -> None:
    for max_tokens, lengths in ((1, [8]), (8, [8]), (9, [16]), (32, [32]), (33, [32, 8]), (77, [32, 32, 16])):
        answer, steps = traced(max_tokens=max_tokens, ignore_end=True)
        assert len(answer.tokens) == max_tokens
        found = {step.canvas: len(step.argmax) for step in steps}
        assert list(found.values()) == lengths


def test_a_trace_shows_a_cut_canvas_as_whole(cuts: list[int]) -> None:
    ends = tuple(range(256))
    _, steps = traced(
        max_tokens=32, end_tokens=ends, entropy_bound=200.0, logprobs=1, confidence_threshold=0.0
    )
    assert cuts == [24], "after the first step: every position is an end token"
    for step in steps:
        assert len(step.argmax) == len(step.tokens) == len(step.entropy) == len(step.logprobs or ()) == 32
    assert len(steps) == 6
    assert len({step.argmax[8:] for step in steps}) == 1, "what was cut off stays as it was"


def test_pinned_canvases_are_not_cut(cuts: list[int]) -> None:
    params = GenerationParams(
        canvas_len="auto", max_tokens=32, end_tokens=tuple(range(256)), entropy_bound=200.0,
        max_denoising_steps=4, confidence_threshold=0.0,
    )  # fmt: skip
    request = EngineRequest(prompt=(5,), seed=1, params=params, pinned=PinnedTokens(fixed={20: 7}))
    run(models(), [request])
    assert not cuts


@pytest.mark.parametrize(
    ("response_format", "most"),
    [(ChoiceFormat(("yes", "no")), 3), (RegexFormat("[ab]{2,5}"), 5), (RegexFormat("a+"), None)],
    ids=["choice", "finite", "infinite"],
)
def test_a_canvas_is_no_longer_than_the_format_needs(
    response_format: ResponseFormat, most: int | None
) -> None:
    compiler = GrammarCompiler(tokenizer(), CONFIG.vocab_size, (1, 106))
    constraint = compiler.compile(response_format)
    assert constraint.most_tokens is not None
    assert constraint.most_tokens[0] == (-1 if most is None else most)
    params = GenerationParams(canvas_len="auto", max_tokens=CONFIG.canvas_len, max_denoising_steps=3)
    request = EngineRequest(prompt=(2, 300), seed=1, params=params, constraint=constraint, trace=True)
    answers, steps = run(tiny_models(), [request])
    if isinstance(response_format, ChoiceFormat):
        assert answers[0].text in response_format.options
    assert len(steps[0].argmax) == (CONFIG.canvas_len if most is None else min(8, CONFIG.canvas_len))


def lossless(number: int, rng: random.Random, **options: Any) -> EngineRequest:
    params = GenerationParams(max_tokens=rng.randint(1, 14), draft_steps=2, end_tokens=(1, 9), **options)
    return EngineRequest(prompt=(rng.randrange(256), 3), seed=number, params=params, row=number)


def test_a_lossless_text_is_the_same_with_canvases_of_any_length() -> None:
    causal = [lossless(number, random.Random(number), decode="causal") for number in range(4)]
    texts, _ = run(models(), causal)
    for canvas_len in ("auto", 1, 5):
        drafts = [
            lossless(number, random.Random(number), decode="lossless", canvas_len=canvas_len)
            for number in range(4)
        ]
        answers, _ = run(models(), drafts)
        assert {row: answer.tokens for row, answer in answers.items()} == {
            row: answer.tokens for row, answer in texts.items()
        }


def halves() -> Iterator[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    for count in (0, 3, 24):
        yield torch.rand(1, 8, generator=generator), count


def test_what_is_left_out_counts_as_certain_whatever_shares_the_batch() -> None:
    free = torch.ones(1, 8, dtype=torch.bool)
    rows = [LeftOut([count], WHOLE).add(entropy, free) for entropy, count in halves()]
    entropies = torch.cat([entropy for entropy, _ in halves()])
    counts = [count for _, count in halves()]
    together = LeftOut(counts, WHOLE).add(entropies, free.expand(3, 8))
    for part in (0, 1):
        assert torch.equal(together[part], torch.cat([row[part] for row in rows]))
    for row, ((entropy, counted), count) in enumerate(zip(rows, counts, strict=True)):
        mean = entropies[row].sum() / (8 + count)
        for bound, settles in ((mean * 1.01, True), (mean * 0.99, False)):
            stop = StableAndConfident(stability=0, confidence=float(bound))
            assert bool(stop(torch.tensor([0]), entropy, counted)) == settles
