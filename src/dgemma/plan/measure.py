"""How long the steps of this machine's engine take with a model, for the simulation of its load."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dgemma.engine.prefix_cache import BLOCK_SIZE
from dgemma.plan.step_times import MeasuredTimes

if TYPE_CHECKING:
    from dgemma.language_model import LanguageModel

ROWS = (1, 2, 4, 8, 16)
_PROMPT_BLOCKS = (2, 9)  # two lengths give what a step and what each token takes


@dataclass(frozen=True)
class _Step:
    rows: int
    encoded: int
    seconds: float


def measure_times(
    lm: LanguageModel,
    *,
    max_num_seqs: int = ROWS[-1],
    causal: bool = False,
    steps: int = 8,
    rounds: int = 3,
    log: Callable[[str], None] = lambda _: None,
) -> MeasuredTimes:
    """So many canvases at once, or left-to-right answers, of exactly `steps` steps; medians of all rounds."""
    rows = [count for count in ROWS if count <= max(2, max_num_seqs)]
    by_rows: dict[int, list[float]] = defaultdict(list)
    alone: dict[int, list[float]] = defaultdict(list)  # by encoded tokens
    with_canvas: list[float] = []
    lengths = [BLOCK_SIZE * blocks for blocks in _PROMPT_BLOCKS]
    for turn in range(-1, rounds):  # the first warms up
        for count in rows:
            log(f"steps of {count} {'answers left to right' if causal else 'canvases'}")
            for step in _run(lm, count, lengths[0], steps, causal, seed=1000 * (turn + 1) + count):
                if turn >= 0 and not step.encoded and step.rows == count:
                    by_rows[count].append(step.seconds)
        # A prompt is read up to its last block, and then that block, with the first step of the canvas.
        for length in lengths:
            first, last, *_ = _run(lm, 1, length, steps, causal, seed=1000 * (turn + 1) + length)
            if turn >= 0:
                alone[first.encoded].append(first.seconds)
                with_canvas.append(last.seconds)
    pairs = [(count, statistics.median(by_rows[count])) for count in rows]
    (short, short_s), (long, long_s) = ((count, statistics.median(alone[count])) for count in sorted(alone))
    token_s = max(0.0, (long_s - short_s) / (long - short))
    return MeasuredTimes(
        pairs,
        encode_s=max(0.0, statistics.median(with_canvas) - pairs[0][1] - BLOCK_SIZE * token_s),
        token_s=token_s,
        encode_alone_s=max(0.0, short_s - short * token_s),
    )


def _run(lm: LanguageModel, count: int, length: int, steps: int, causal: bool, *, seed: int) -> list[_Step]:
    import torch

    from dgemma.engine.kv_cache_manager import KVCacheManager
    from dgemma.engine.rank_engine import make_engine
    from dgemma.engine.request import EngineRequest
    from dgemma.engine.scheduler import SchedulerConfig
    from dgemma.params import GenerationParams

    model = lm.transformer
    engine = make_engine(
        {None: model},
        KVCacheManager(block_size=BLOCK_SIZE, window=model.config.window),
        SchedulerConfig(max_num_seqs=count, chunk_size=1 << 20, encode_block=model.execution.encode_block),
        tokenizer=lm.tokenizer,
    )
    params = GenerationParams(
        max_tokens=steps if causal else model.config.canvas_len,
        decode="causal" if causal else "diffuse",
        max_denoising_steps=steps,
        confidence_threshold=0.0,  # never settles before
        ignore_end=True,
    )
    random = torch.Generator().manual_seed(seed)
    requests = []
    for row in range(count):
        prompt = torch.randint(model.config.vocab_size, (length,), generator=random).tolist()
        # The end of a turn would divide the prompt's pass in two.
        prompt = [0 if token in params.end_tokens else token for token in prompt]
        asked = EngineRequest(prompt=tuple(prompt), seed=seed + row, params=params)
        requests.append(engine.validate(asked))
    engine.reserve(requests)
    for request in requests:
        engine.add(request)
    found, before = [], 0
    while not engine.is_idle:
        began = time.perf_counter()
        engine.step()
        seconds, after = time.perf_counter() - began, engine.stats().counters["prefill_tokens"]
        found.append(_Step(engine.num_computed, after - before, seconds))
        before = after
    return found
