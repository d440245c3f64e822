"""A computation that fails for a batch is repeated for each request alone, from the state before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dgemma.engine import batch_runner, model_runner
from dgemma.engine import engine as engine_module
from dgemma.engine.canvas_store import CanvasStore
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.kv_store import KVStore
from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Failed
from dgemma.events import Answer, Commit, Event, Finish, Timings
from dgemma.params import GenerationParams
from engine_life import CONFIG, ENCODE_BLOCK, make_engine

PARAMS = GenerationParams(max_tokens=8, max_denoising_steps=4, ignore_end=True, temperature=1.0, logprobs=2)
REQUESTS = [
    EngineRequest(
        prompt=(2, 300, 301, 106, 9, 10 + seed),
        seed=seed,
        params=PARAMS,
        drafts=True,
        pinned=PinnedTokens(watch={1: (5, 6), 6: (7, 8)}),
    )
    for seed in (1, 2)
]


@dataclass
class Run:
    """Everything that came of the requests."""

    answers: dict[int, Answer] = field(default_factory=dict)
    events: dict[int, list[Event | Failed]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


def run(requests: Sequence[EngineRequest] = REQUESTS, *, chunk_size: int = 16, **options: Any) -> Run:
    memory = KVCacheManager(block_size=4, window=CONFIG.window, full_blocks=60, window_blocks=30)
    engine: Engine = make_engine(
        memory, SchedulerConfig(max_num_seqs=4, chunk_size=chunk_size, encode_block=ENCODE_BLOCK), **options
    )
    numbers = [engine.add(engine.validate(request)) for request in requests]
    found = Run(events={number: [] for number in numbers})
    while not engine.is_idle:
        for number, event in engine.step():
            found.events[number].append(event)
            if isinstance(event, Finish):
                found.answers[number] = replace(event.answer, timings=Timings())
    stats = engine.stats()
    assert stats.slots_used == stats.full_blocks_used == stats.window_blocks_used == 0
    found.counters = dict(stats.counters)
    return found


class Once:
    """Calls the function, and then raises, at call `visit` only."""

    def __init__(self, function: Callable[..., Any], visit: int) -> None:
        self.function = function
        self.visit = visit
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        found = self.function(*args, **options)
        self.calls += 1
        if self.calls == self.visit + 1:
            raise RuntimeError("a fault of the test")
        return found


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (model_runner, "log_probs"),
        (model_runner, "_watched"),
        (model_runner, "sample_step"),
        (engine_module, "sample_canvases"),
        (engine_module, "forward"),
        (engine_module, "open_canvas"),
    ],
)
@pytest.mark.parametrize("visit", [0, 1, 3])
def test_a_fault_once_in_a_batch_changes_neither_request(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, visit: int
) -> None:
    undisturbed = run()
    assert [len(answer.tokens) for answer in undisturbed.answers.values()] == [8, 8]
    assert sum(sum(answer.steps) for answer in undisturbed.answers.values()) > 4, "canvases of several steps"
    failing = Once(getattr(place, name), visit)
    monkeypatch.setattr(place, name, failing)
    disturbed = run()
    assert failing.calls > visit, "the fault was met"
    assert disturbed.answers == undisturbed.answers
    assert disturbed.counters == undisturbed.counters, "a forward that is repeated counts once"


@pytest.mark.parametrize("point", ["forward", "forward_done", "sample", "sample_done"])
@pytest.mark.parametrize("visit", [0, 1, 2, 5])
def test_a_fault_before_or_after_a_computation_changes_neither_request(point: str, visit: int) -> None:
    visits = 0

    def fault(at: str, numbers: Sequence[int]) -> None:
        nonlocal visits
        if at == point and len(numbers) > 1:
            visits += 1
            if visits == visit + 1:
                raise RuntimeError("a fault of the test")

    undisturbed, disturbed = run(), run(fault=fault)
    assert visits > visit, "the fault was met"
    assert disturbed.answers == undisturbed.answers
    assert disturbed.counters == undisturbed.counters


@pytest.mark.parametrize("suffix", ["", "_done"])
@pytest.mark.parametrize(
    ("act", "visit"),
    [("_store_encoded", 0), ("_store_encoded", 1), *[("_process_output", n) for n in range(4)]],
)
def test_a_fault_of_one_request_ends_it_once_and_leaves_the_other(act: str, suffix: str, visit: int) -> None:
    """What the act that failed had to tell is not told: Failed is the last event, and the only last one."""
    visits = 0

    def fault(at: str, numbers: Sequence[int]) -> None:
        nonlocal visits
        if at == act + suffix and numbers == [0]:
            visits += 1
            if visits == visit + 1:
                raise RuntimeError("a fault of the test")

    undisturbed, disturbed = run(), run(fault=fault)
    assert visits == visit + 1, "the fault was met, and no act of this request after it"
    events = disturbed.events[0]
    assert isinstance(events[-1], Failed)
    assert not [event for event in events if isinstance(event, Finish)]
    told = [event for event in events if isinstance(event, Commit)]
    assert told == [event for event in undisturbed.events[0] if isinstance(event, Commit)][: len(told)]
    assert disturbed.answers == {1: undisturbed.answers[1]}


def test_the_last_act_of_a_request_that_fails_tells_no_finish() -> None:
    undisturbed = run()
    visits = sum(undisturbed.answers[0].steps)
    seen = 0

    def fault(at: str, numbers: Sequence[int]) -> None:
        nonlocal seen
        if at == "_process_output_done" and numbers == [0]:
            seen += 1
            if seen == visits:
                raise RuntimeError("a fault of the test")

    disturbed = run(fault=fault)
    assert seen == visits
    assert [type(event) for event in disturbed.events[0] if isinstance(event, Finish | Failed)] == [Failed]
    assert disturbed.answers == {1: undisturbed.answers[1]}


def test_a_canvas_that_cannot_be_written_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of a canvas's state may be new then: nobody steps on from there."""
    undisturbed = run()
    whole, seen = CanvasStore.write, 0

    def write(self: CanvasStore, slots: Sequence[int], state: Any, soft: Any) -> None:
        nonlocal seen
        if soft is not None and 0 in slots:
            seen += 1
            if seen == 2:
                self._state.canvas[0] += 1
                raise RuntimeError("a fault of the test")
        whole(self, slots, state, soft)

    monkeypatch.setattr(CanvasStore, "write", write)
    disturbed = run()
    assert seen >= 2
    assert len(disturbed.answers) == 1
    ((number, answer),) = disturbed.answers.items()
    assert answer == undisturbed.answers[number]


def test_memory_that_runs_out_halves_the_batch_and_changes_no_answer() -> None:
    """Four at once are too many, two are not."""
    requests = [replace(REQUESTS[0], seed=seed) for seed in range(4)]
    sizes: list[int] = []

    def fault(point: str, request_ids: Sequence[int]) -> None:
        if point == "forward":
            sizes.append(len(request_ids))
            if len(request_ids) > 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")

    disturbed, undisturbed = run(requests, chunk_size=64, fault=fault), run(requests)
    assert disturbed.answers == undisturbed.answers
    assert disturbed.counters["out_of_memory"] == 1, "the batch stays small"
    assert sizes[:3] == [4, 2, 2]
    assert set(sizes[3:]) == {2}


def test_larger_batches_are_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "_CALM_STEPS", 2)
    requests = [replace(REQUESTS[0], seed=seed) for seed in range(4)]
    sizes: list[int] = []

    def fault(point: str, request_ids: Sequence[int]) -> None:
        if point == "forward":
            sizes.append(len(request_ids))
            if len(sizes) == 1:
                raise MemoryError

    assert run(requests, chunk_size=64, fault=fault).answers == run(requests).answers
    assert sizes[:3] == [4, 2, 2]
    assert 4 in sizes[3:]


def test_one_request_for_which_memory_never_suffices_fails_alone() -> None:
    requests = [replace(REQUESTS[0], seed=seed) for seed in range(3)]

    def fault(point: str, request_ids: Sequence[int]) -> None:
        if point == "forward" and 1 in request_ids:
            raise MemoryError

    found, undisturbed = run(requests, fault=fault), run(requests)
    assert {number: found.answers[number] for number in (0, 2)} == {
        number: undisturbed.answers[number] for number in (0, 2)
    }
    assert isinstance(found.events[1][-1], Failed)


def test_blocks_of_a_failed_request_are_not_found_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks were allocated, and never written: who found them would attend to zeros."""
    request = replace(REQUESTS[0], prompt=tuple(range(2, 16)), drafts=False)
    memory = KVCacheManager(block_size=4, window=CONFIG.window, full_blocks=60, window_blocks=30)
    engine = make_engine(memory, SchedulerConfig(max_num_seqs=4, chunk_size=16, encode_block=ENCODE_BLOCK))

    def write(*args: Any) -> None:
        raise RuntimeError("a fault of the test")

    with monkeypatch.context() as patched:
        patched.setattr(KVStore, "write", write)
        engine.add(engine.validate(request))
        assert [type(event) for _, event in engine.step()] == [Failed]
    assert len(memory.prefix_cache) == memory.prefix_cache.num_tails == 0
    engine.add(engine.validate(request))
    events = []
    while not engine.is_idle:
        events += [event for _, event in engine.step()]
    (finish,) = (event for event in events if isinstance(event, Finish))
    assert replace(finish.answer, timings=Timings()) == run([request]).answers[0]


def test_counters_count_steps_and_tokens_once() -> None:
    request = replace(REQUESTS[0], prompt=(2, 300, 301))
    found = run([request])
    (answer,) = found.answers.values()
    # The prompt is read together with the first step of the first canvas, and each commit with the next one.
    assert found.counters == {
        "steps": sum(answer.steps),
        "prefill_tokens": 3,
        "denoise_forwards": sum(answer.steps),
        "commit_tokens": 4,
        "verify_tokens": 0,
        "out_of_memory": 0,
    }
    both = run([request, replace(request, seed=2)])
    assert both.counters["steps"] == max(sum(answer.steps) for answer in both.answers.values())


def test_a_scan_takes_as_many_canvases_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = engine_module.sample_canvases

    def noted(model: Any, state: Any, sequences: Sequence[Any], hidden: Any) -> Any:
        sizes.append(len(sequences))
        return whole(model, state, sequences, hidden)

    monkeypatch.setattr(engine_module, "sample_canvases", noted)
    alone = run([REQUESTS[0]]).answers[0]
    sizes.clear()
    monkeypatch.setattr(engine_module, "_MAX_POSITIONS", 2 * CONFIG.canvas_len + 1)
    requests = [replace(REQUESTS[0], seed=seed) for seed in (1, 2, 3)]
    assert run(requests).answers[0] == alone
    assert sizes[:2] == [2, 1]
    monkeypatch.setattr(engine_module, "_MAX_POSITIONS", 1)
    sizes.clear()
    assert run(requests).answers[0] == alone
    assert set(sizes) == {1}
