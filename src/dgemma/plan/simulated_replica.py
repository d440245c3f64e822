"""A replica in virtual time: the engine's own scheduler and blocks, with computed times in place of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dgemma.engine.kv_cache_manager import Capacity, KVCacheManager
from dgemma.engine.scheduler import (
    COMMIT,
    DENOISE,
    QueuedRequest,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
)
from dgemma.errors import InputError
from dgemma.plan.step_times import StepTimes
from dgemma.plan.traffic import TrafficRequest


@dataclass(frozen=True, kw_only=True)
class ReplicaShape:
    """What all replicas have in common. canvas_len: None of a left-to-right model."""

    times: StepTimes
    capacity: Capacity
    block_size: int
    window: int
    canvas_len: int | None
    max_num_seqs: int = 16
    chunk_size: int = 1024


@dataclass(slots=True)
class _Written:
    answer: TrafficRequest
    canvas: int = 0
    steps_left: int = 0


@dataclass(slots=True)
class _Batch:
    """Steps under way. Those that only denoise the same canvases are taken together."""

    began: float
    step_s: float
    count: int
    scheduled: tuple[ScheduledSequence, ...]

    @property
    def ends(self) -> float:
        return self.began + self.count * self.step_s


class SimulatedReplica:
    def __init__(self, number: int, shape: ReplicaShape) -> None:
        self.number = number
        self.batch: _Batch | None = None
        self.busy_s = 0.0
        self.row_s = 0.0  # seconds of all rows
        self.version = 0  # of what is planned: an event of an older one is void
        self._shape = shape
        self._blocks = KVCacheManager(
            block_size=shape.block_size,
            window=shape.window,
            full_blocks=shape.capacity.full_blocks,
            window_blocks=shape.capacity.window_blocks,
            max_gathered=shape.capacity.max_gathered,
        )
        self._scheduler = Scheduler(
            self._blocks,
            SchedulerConfig(max_num_seqs=shape.max_num_seqs, chunk_size=shape.chunk_size, encode_block=1),
        )
        self._written: dict[int, _Written] = {}
        self._next = 0

    @property
    def answers(self) -> list[TrafficRequest]:
        """All that it has, running and waiting."""
        return [written.answer for written in self._written.values()]

    @property
    def load(self) -> int:
        return len(self._written)

    def submit(self, answer: TrafficRequest, now: float) -> None:
        """Begins with the next step. Call `plan` when no step is under way."""
        canvas_len = self._shape.canvas_len
        # As the engine counts: whole canvases, the last of which does not join the context.
        written = len(answer.steps) * canvas_len if canvas_len else answer.length
        room = self._blocks.max_len - written
        if room < 1:
            raise InputError(
                f"an answer of {answer.length} tokens does not fit into a replica, whose KV cache has space "
                f"for {self._blocks.max_len}."
            )
        tokens = answer.tokens[:room]
        request = QueuedRequest(request_id=self._next, tokens=tokens, max_len=len(tokens) + written)
        self._scheduler.add(request, now)
        self._written[self._next] = _Written(answer)
        self._next += 1
        if self.batch is not None:  # the new request joins at the next end of a step
            passed = math.ceil((now - self.batch.began) / self.batch.step_s)
            self.batch.count = min(self.batch.count, max(1, passed))

    def plan(self, now: float) -> float | None:
        """Begin the next steps -> when they end; None: nothing to do."""
        output = self._scheduler.schedule(now)
        for request_id in output.admitted:
            self._written[request_id].answer.cached = self._scheduler.block_table(request_id).num_cached
        if not output.scheduled:
            self.batch = None
            return None
        rows = encoded = context = 0
        count = 1 << 30
        for each in output.scheduled:
            context += each.start
            if each.phase is DENOISE:
                count = min(count, self._written[each.request_id].steps_left)
                rows += 1
            else:  # its last chunk opens a canvas, which takes its first step in the same forward
                count = 1
                encoded += each.stop - each.start
                rows += each.is_last
        step_s = self._shape.times.seconds(rows, encoded, context // len(output.scheduled))
        self.batch = _Batch(now, step_s, count, output.scheduled)
        return self.batch.ends

    def finish(self) -> list[TrafficRequest]:
        """The steps under way are over -> the answers that are whole."""
        batch = self.batch
        assert batch is not None
        self.busy_s += batch.count * batch.step_s
        self.row_s += batch.count * batch.step_s * len(batch.scheduled)
        done = []
        for each in batch.scheduled:
            written = self._written[each.request_id]
            if each.phase is DENOISE:
                written.steps_left -= batch.count
            else:
                self._scheduler.allocate(each)
                if not self._scheduler.mark_computed(each):
                    continue
                written.steps_left = written.answer.steps[written.canvas] - 1
                self._scheduler.set_phase(each.request_id, DENOISE)
            if self._shape.canvas_len is None and written.answer.first_text_at is None:
                written.answer.first_text_at = batch.ends  # its first token
            if not written.steps_left and self._end_canvas(each.request_id, written, batch.ends):
                done.append(written.answer)
        self.batch = None
        return done

    def _end_canvas(self, request_id: int, written: _Written, now: float) -> bool:
        """-> Whether the answer is whole."""
        answer = written.answer
        answer.first_text_at = now if answer.first_text_at is None else answer.first_text_at
        written.canvas += 1
        if written.canvas < len(answer.steps):
            assert self._shape.canvas_len is not None
            tokens = [answer.conversation.number] * self._shape.canvas_len
            self._scheduler.set_phase(request_id, COMMIT, tokens)
            return False
        self._scheduler.remove(request_id, reusable=True)
        del self._written[request_id]
        return True
