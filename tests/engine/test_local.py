"""The Python API on its engine: what was read is not read again, and calls do not touch each other."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma import Draft, LanguageModel
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.engine.local import MAX_NUM_SEQS
from dgemma.engine.prefix_cache import BLOCK_SIZE
from dgemma.sampling.sampler import Sampler

OPTIONS: dict[str, Any] = {"max_denoising_steps": 3, "seed": 3, "ignore_end": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return path


@pytest.fixture
def lm(checkpoint: Any) -> LanguageModel:
    """A handle that remembers nothing yet."""
    return dgemma.load(checkpoint, exact=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


QUESTION = (
    "Tell me about the sea, its tides and its colours, and why the water is salty but rivers are not. " * 2
)


@pytest.mark.parametrize("max_tokens", [20, 100], ids=["one canvas", "several"])
def test_the_next_turn_reads_only_what_is_new_and_changes_no_text(lm: LanguageModel, max_tokens: int) -> None:
    chat = [user(QUESTION), assistant(""), user("And the sky?")]
    first = lm.chat(chat[:1], max_tokens=max_tokens, **OPTIONS)
    assert first.cached_tokens == 0
    chat[1] = assistant(first.text)
    second = lm.chat(chat, max_tokens=max_tokens, **OPTIONS)
    assert second.cached_tokens > first.prompt_tokens - 2 * BLOCK_SIZE
    fresh = lm.exact().chat(chat, max_tokens=max_tokens, **OPTIONS)
    assert fresh.cached_tokens == 0
    assert fresh.tokens == second.tokens


def test_an_answers_own_canvases_are_not_read_again(lm: LanguageModel) -> None:
    prompt = tuple(lm.chat_template.render([user(QUESTION)]))
    first = lm.generate(prompt, max_tokens=100, **OPTIONS)
    # All but the last canvas were encoded; a prompt that goes on with these tokens takes them all.
    known = len(prompt) + (len(first.tokens) - 1) // lm.config.canvas_len * lm.config.canvas_len
    longer = lm.generate((*prompt, *first.tokens), max_tokens=20, **OPTIONS)
    assert longer.cached_tokens == known // BLOCK_SIZE * BLOCK_SIZE
    assert longer.tokens == lm.exact().generate((*prompt, *first.tokens), max_tokens=20, **OPTIONS).tokens


def test_another_conversation_reads_everything(lm: LanguageModel) -> None:
    lm.chat("One thing. " * 20, max_tokens=20, **OPTIONS)
    other = lm.chat("Another thing. " * 20, max_tokens=20, **OPTIONS)
    assert other.cached_tokens == 0


def test_another_adapter_reads_everything(lm: LanguageModel) -> None:
    ids = list(range(5, 105))
    lm.generate(ids, max_tokens=8, **OPTIONS)
    assert lm.generate(ids, max_tokens=8, **OPTIONS).cached_tokens > 0
    adapted = lm.with_adapter(dgemma.LoraSettings(rank=2))
    assert adapted.generate(ids, max_tokens=8, **OPTIONS).cached_tokens == 0


def test_a_turn_that_was_broken_off_leaves_nothing_behind(lm: LanguageModel) -> None:
    chat = [user(QUESTION)]
    truth = lm.exact().chat(chat, max_tokens=40, **OPTIONS)
    for events in (1, 2, 5):
        stream = lm.stream_chat(chat, max_tokens=90, **OPTIONS)
        for _ in range(events):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert lm.chat(chat, max_tokens=40, **OPTIONS).tokens == truth.tokens
    assert lm._engine is not None
    stats = lm._engine._engine.stats()
    assert (stats.slots_used, stats.full_blocks_used, stats.window_blocks_used) == (0, 0, 0)


def test_two_answers_written_in_turn_do_not_touch_each_other(lm: LanguageModel) -> None:
    chat = [user(QUESTION)]
    longer = [*chat, assistant("It is wide."), user("And the sky?")]
    truth = [lm.exact().chat(messages, max_tokens=70, **OPTIONS).tokens for messages in (chat, longer)]
    first = lm.stream_chat(chat, max_tokens=70, **OPTIONS)
    next(first)
    assert lm.chat(longer, max_tokens=70, **OPTIONS).tokens == truth[1]
    *_, finish = first
    assert finish.answer.tokens == truth[0]


def test_a_sequence_does_not_run_ahead_of_its_reader(lm: LanguageModel) -> None:
    """A stream that is not read costs other calls nothing but its place."""
    unread = lm.stream("Hello", max_tokens=90, **OPTIONS)
    draft = next(unread)
    assert isinstance(draft, Draft)
    assert lm._engine is not None
    before = lm._engine._engine.stats().counters["denoise_forwards"]
    lm.generate("Other", max_tokens=8, **OPTIONS)
    # The first step of the call still takes the stream along: its mailbox was empty.
    assert (
        lm._engine._engine.stats().counters["denoise_forwards"] - before <= OPTIONS["max_denoising_steps"] + 1
    )


def test_streams_that_rest_in_every_slot_do_not_block_a_call(lm: LanguageModel) -> None:
    truth = lm.exact().generate("Hello", max_tokens=8, **OPTIONS).tokens
    open_streams = [lm.stream("x", max_tokens=32, **OPTIONS) for _ in range(MAX_NUM_SEQS)]
    for stream in open_streams:
        next(stream)
    assert lm.generate("Hello", max_tokens=8, **OPTIONS).tokens == truth


def test_more_prompts_than_slots_are_all_answered(lm: LanguageModel) -> None:
    prompts = [[5 + n % 50, 7] for n in range(MAX_NUM_SEQS + 6)]
    answers = lm.generate(prompts, max_tokens=4, seeds=[1] * len(prompts), max_denoising_steps=1)
    assert [a.tokens for a in answers[:6]] == [
        lm.generate(prompt, max_tokens=4, seed=1, max_denoising_steps=1).tokens for prompt in prompts[:6]
    ]
    assert len(answers) == len(prompts)


def test_threads_share_an_engine_and_get_their_own_answers(lm: LanguageModel) -> None:
    fresh = lm.exact()
    truth = [fresh.generate([5, n], max_tokens=40, seed=n, max_denoising_steps=3).tokens for n in range(4)]
    found: dict[int, tuple[int, ...]] = {}

    def ask(number: int) -> None:
        answer = lm.generate([5, number], max_tokens=40, seed=number, max_denoising_steps=3)
        found[number] = answer.tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [found[number] for number in range(4)] == truth


def test_a_part_that_fails_ends_its_own_call_only(lm: LanguageModel) -> None:
    @dataclass(frozen=True)
    class Broken:
        def __call__(self, reading: Any) -> Tensor:
            raise ZeroDivisionError("a researcher's mistake")

    truth = lm.exact().generate("Hello", max_tokens=70, **OPTIONS).tokens
    other = lm.stream("Hello", max_tokens=70, **OPTIONS)
    next(other)
    with pytest.raises(ZeroDivisionError, match="a researcher's mistake"):
        lm.generate("Hello", sampler=Sampler(score=Broken()))
    *_, finish = other
    assert finish.answer.tokens == truth


def test_memory_grows_with_what_is_asked_for_and_keeps_what_was_read(lm: LanguageModel) -> None:
    ids = torch.randint(6, 2000, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    lm.generate(ids[:100], max_tokens=8, **OPTIONS)
    assert lm._engine is not None
    small = lm._engine._engine.stats().full_blocks_total
    longer = lm.generate(ids, max_tokens=300, **OPTIONS)
    assert lm._engine._engine.stats().full_blocks_total > small
    assert longer.cached_tokens == 100 // BLOCK_SIZE * BLOCK_SIZE
    assert longer.tokens == lm.exact().generate(ids, max_tokens=300, **OPTIONS).tokens


def test_only_one_thread_at_a_time_steps_the_engine(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm.generate([5, 6], max_tokens=4, **OPTIONS)
    assert lm._engine is not None
    engine = lm._engine._engine
    whole, inside, overlaps = engine.step, 0, 0

    def step(paused: Any = ()) -> Any:
        nonlocal inside, overlaps
        inside += 1
        overlaps += inside > 1
        time.sleep(0.002)  # another thread runs
        found = whole(paused)
        inside -= 1
        return found

    monkeypatch.setattr(engine, "step", step)
    threads = [
        threading.Thread(target=lambda n=n: lm.generate([5, n], max_tokens=4, **OPTIONS)) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert overlaps == inside == 0


class Watcher:
    """In a cycle with a stream: only the garbage collector closes it."""

    def __init__(self, events: Any) -> None:
        self.events, self.itself = events, self


def test_a_stream_that_is_collected_during_a_step_is_ended_after_it(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lm._local_engine._engine
    step = type(engine).step

    def collecting(self: Any, paused: Any = ()) -> Any:
        gc.collect()  # the collector may run at any allocation
        return step(self, paused)

    left = Watcher(lm.stream("The sea is", max_tokens=40, **OPTIONS))
    next(left.events)
    del left
    monkeypatch.setattr(type(engine), "step", collecting)
    found: list[Any] = []
    reader = threading.Thread(
        target=lambda: found.append(lm.generate("A", max_tokens=8, **OPTIONS)), daemon=True
    )
    reader.start()
    reader.join(120)
    assert len(found) == 1, "it waits for itself"
    assert engine.is_idle
