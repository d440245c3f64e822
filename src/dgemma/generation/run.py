"""A whole generation: prompts in, events out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dgemma.errors import InputError
from dgemma.events import Commit, Event, Finish, FinishReason, Timings
from dgemma.generation.cost import cheaper_decode
from dgemma.generation.job import Job
from dgemma.generation.loop import Batch, Stopwatch, diffuse, write_causally
from dgemma.generation.parts import Model, prefill, sampler_for
from dgemma.generation.writer import AnswerWriter

DEFAULT_MAX_TOKENS = 1024


@torch.inference_mode()
def run(model: Model, job: Job, watch: Stopwatch | None = None) -> Iterator[Event]:
    """The events of all rows, in the order they happen; each row ends with a `Finish`."""
    watch = watch or Stopwatch(job.params.deadline_s)
    check_prompts(model, job.prompts)
    limits = [_max_tokens(model, len(prompt), job.params.max_tokens) for prompt in job.prompts]
    decode: str = job.params.decode
    if decode == "auto":
        decode = cheaper_decode(model.stack, model.device.type, max(limits))
    writers = [
        AnswerWriter(row=row, seed=seed, max_tokens=limit, params=job.params, tokenizer=job.tokenizer)
        for row, (seed, limit) in enumerate(zip(job.seeds, limits, strict=True))
    ]
    memory = job.memory
    cache = None if memory is None else memory.take(job.prompts[0])
    cached = 0 if cache is None else cache.lengths[0]
    cache = cache or model.new_cache(len(job.prompts))
    last = prefill(model, [prompt[cached:] for prompt in job.prompts], cache, watch.is_late)
    watch.lap("prefill")

    def finish(writer: AnswerWriter) -> Finish:
        timings = Timings(
            prefill_s=watch.laps.get("prefill", 0.0),
            denoise_s=watch.laps.get("denoise", 0.0),
            commit_s=watch.laps.get("commit", 0.0),
            first_commit_s=first_commit_s,
            total_s=watch.total_s,
        )
        prompt_tokens = len(job.prompts[writer.row])
        return Finish(
            row=writer.row,
            answer=writer.answer(
                decode=decode, timings=timings, prompt_tokens=prompt_tokens, cached_tokens=cached
            ),
        )

    first_commit_s = 0.0
    if last is None:
        for writer in writers:
            writer.reason = FinishReason.DEADLINE
            yield finish(writer)
        return
    batch = Batch(model, cache, list(writers), job.params, watch, owns_cache=memory is None)
    sampler = job.sampler or sampler_for(job.params)
    events = write_causally(batch, last) if decode == "causal" else diffuse(batch, sampler, drafts=job.drafts)
    for event in events:
        yield event
        if isinstance(event, Commit):
            first_commit_s = first_commit_s or watch.total_s
            writer = writers[event.row]
            if writer.reason is None:
                continue
            if memory is not None:
                memory.keep((job.prompts[0], cache), ((*job.prompts[0], *writer.committed), batch.cache))
            yield finish(writer)


def check_prompts(model: Model, prompts: Sequence[Sequence[int]]) -> None:
    vocab_size = model.config.vocab_size
    for number, prompt in enumerate(prompts):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise InputError(f"{which} is empty; give it at least one token.")
        wrong = [token for token in prompt if not 0 <= token < vocab_size]
        if wrong:
            raise InputError(f"{which} holds token {wrong[0]}; this vocabulary ends at {vocab_size - 1}.")


def _max_tokens(model: Model, prompt_len: int, asked: int | None) -> int:
    """How many tokens may be written: whole canvases must fit behind the prompt."""
    config = model.config
    room = max(0, config.max_positions - prompt_len) // config.canvas_len * config.canvas_len
    if room == 0:
        raise InputError(
            f"the prompt has {prompt_len} tokens; this model's context of {config.max_positions} then has no "
            f"room for a canvas of {config.canvas_len}. Shorten the prompt."
        )
    if asked is not None and asked > room:
        raise InputError(
            f"max_tokens is {asked}; this model's context leaves {room}. Lower it or shorten the prompt."
        )
    return min(DEFAULT_MAX_TOKENS, room) if asked is None else asked
