"""Many replicas, a router and a load in virtual time. Events are ends of steps, arrivals and failures."""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dgemma.engine.prefix_cache import BlockHashChain
from dgemma.errors import InputError
from dgemma.plan.simulated_replica import ReplicaShape, SimulatedReplica
from dgemma.plan.traffic import Arrivals, Traffic, TrafficRequest, canvases_of
from dgemma.scale.autoscaling import Autoscaler, AutoscalingRule
from dgemma.scale.prefix_routes import PrefixRoutes

Routing = Literal["prefix", "load", "random"]
_SCALE_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """replicas: at the start, all warm. steps: of canvases that were seen, to draw from.

    router_blocks, imbalance: of `PrefixRoutes`.
    start_s: from the wish for a replica to its first request. mean_life_s: after which a replica fails and
      is started again, while its requests begin again elsewhere. overhead_s: of routing, per answer.
    """

    shape: ReplicaShape
    replicas: int
    steps: Sequence[int] = (16,)
    routing: Routing = "prefix"
    router_blocks: int = 200_000
    imbalance: int = 3
    start_s: float = 60.0
    mean_life_s: float = math.inf
    overhead_s: float = 0.0
    autoscaling: AutoscalingRule | None = None

    def check(self) -> None:
        if not self.mean_life_s > 0:
            raise InputError.about("mean_life_s", f"is {self.mean_life_s}; it must be more than 0.")
        if not 0 <= self.start_s < math.inf:
            raise InputError.about("start_s", f"is {self.start_s}; it must be at least 0.")


@dataclass
class LoadResult:
    """Of the requests that arrived after the warm-up; those without an answer at the end are `unfinished`."""

    duration_s: float
    ended_s: float = 0.0  # when the last answer was whole
    finished: int = 0
    unfinished: int = 0
    retried: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_s: array[float] = field(default_factory=lambda: array("d"))
    first_text_s: array[float] = field(default_factory=lambda: array("d"))
    replica_s: float = 0.0  # paid for, starting replicas too
    utilisation: float = 0.0  # share of the running replicas' time in which a step was computed
    mean_rows: float = 0.0  # of a step
    num_replicas: list[tuple[float, int]] = field(default_factory=list)  # whenever it changed
    failures: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def quantile(self, share: float, of: Literal["answer", "first_text"] = "answer") -> float:
        """Seconds in which this share of all requests was answered. Those without an answer took forever."""
        values = sorted(self.answer_s if of == "answer" else self.first_text_s)
        at = math.ceil(share * (len(values) + self.unfinished)) - 1
        return values[max(at, 0)] if at < len(values) else math.inf


def simulate(
    fleet: Fleet,
    traffic: Traffic,
    *,
    duration_s: float,
    warm_up_s: float = 0.0,
    seed: int = 0,
    arrivals: Arrivals | None = None,
    give_up: Callable[[LoadResult], bool] = lambda _: False,
    log: Callable[[str], None] = lambda _: None,
) -> LoadResult:
    """Requests arrive for `warm_up_s` and `duration_s`; then as much time again passes at most.

    arrivals: instead of those that `traffic` describes. give_up: asked after each answer; where it is true,
    all others stay without one.
    """
    traffic.check()
    fleet.check()
    arrivals = arrivals or Arrivals(traffic, seed)
    return _Simulation(fleet, arrivals, duration_s, warm_up_s, seed, give_up, log).run()


class _Simulation:
    def __init__(
        self,
        fleet: Fleet,
        arrivals: Arrivals,
        duration_s: float,
        warm_up_s: float,
        seed: int,
        give_up: Callable[[LoadResult], bool],
        log: Callable[[str], None],
    ) -> None:
        self._fleet, self._arrivals = fleet, arrivals
        self._warm_up_s, self._last_arrival = warm_up_s, warm_up_s + duration_s
        self._random = random.Random(seed)  # noqa: S311
        self._beginnings = arrivals.beginnings()
        self._give_up, self._log = give_up, log
        self._is_given_up = False
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._routes: PrefixRoutes[int] = PrefixRoutes(
            blocks=fleet.router_blocks, imbalance=fleet.imbalance, seed=seed
        )
        self._replicas: dict[int, SimulatedReplica] = {}
        self._loads: dict[int, int] = {}  # of replicas that take requests
        self._open: list[int] = []  # the same, to choose from
        self._draining: set[int] = set()
        self._starting = 0
        self._unrouted: list[TrafficRequest] = []  # there was no replica
        self._born: dict[int, float] = {}
        self._made = 0
        self._scaler = None if fleet.autoscaling is None else Autoscaler(fleet.autoscaling)
        self._busy_s = self._row_s = self._alive_s = 0.0
        self._pending = 0  # requests that count and have no answer
        self._found = LoadResult(duration_s)

    def run(self) -> LoadResult:
        for _ in range(self._fleet.replicas):
            self._open_replica(0.0)
        self._expect_next()
        if self._scaler is not None:
            self._at(_SCALE_EVERY_S, self._scale)
        ends = self._last_arrival + max(self._found.duration_s, 60.0)
        told = 0.0
        now = 0.0
        while self._events and not self._is_given_up:
            now, _, event = heapq.heappop(self._events)
            if now > ends or (now > self._last_arrival and not self._pending):
                break
            if now >= told:
                self._log(f"{now:,.0f} of {self._last_arrival:,.0f} s, {self._found.finished:,} answers")
                told = now + max(60.0, self._last_arrival / 20)
            event(now)
        for number in list(self._replicas):
            self._close_replica(number, now)
        found = self._found
        found.unfinished, found.ended_s = self._pending, now
        found.utilisation = self._busy_s / self._alive_s if self._alive_s else 0.0
        found.mean_rows = self._row_s / self._busy_s if self._busy_s else 0.0
        return found

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    # Requests

    def _expect_next(self) -> None:
        following = next(self._beginnings, None)
        if following is not None and following.arrived <= self._last_arrival:

            def begin(now: float) -> None:
                self._arrive(following, now)
                self._expect_next()

            self._at(following.arrived, begin)

    def _arrive(self, answer: TrafficRequest, now: float) -> None:
        canvas_len = self._fleet.shape.canvas_len
        if canvas_len is None:
            answer.steps = [answer.length]
        elif not answer.steps:
            answer.steps = canvases_of(answer.length, canvas_len, self._fleet.steps, self._random)
        self._pending += answer.arrived >= self._warm_up_s
        self._route(answer, now)

    def _route(self, answer: TrafficRequest, now: float) -> None:
        if not self._open:
            self._unrouted.append(answer)
            return
        answer.attempts += 1
        number = self._choose(answer)
        replica = self._replicas[number]
        self._loads[number] += 1
        was_idle = replica.batch is None
        replica.submit(answer, now)
        self._go_on(replica, now if was_idle else None)

    def _choose(self, answer: TrafficRequest) -> int:
        if self._fleet.routing == "random":
            return self._random.choice(self._open)
        hashes: list[bytes] = []
        if self._fleet.routing == "prefix":
            chain = BlockHashChain(self._fleet.shape.block_size)
            chain.add(answer.tokens)
            hashes = chain.hashes
        number = self._routes.choose(hashes, self._loads, self._open)
        if hashes:
            self._routes.sent(hashes, number)
        return number

    def _go_on(self, replica: SimulatedReplica, now: float | None) -> None:
        """Plan the next step at `now`, or take note that the one under way ends sooner."""
        if now is not None:
            replica.plan(now)
        if replica.batch is None:
            if replica.number in self._draining and not replica.load:
                self._close_replica(replica.number, now or 0.0)
            return
        replica.version += 1
        version = replica.version

        def end(now: float) -> None:
            if replica.version == version and replica.number in self._replicas:
                for answer in replica.finish():
                    self._answered(replica, answer, now)
                self._go_on(replica, now)

        self._at(replica.batch.ends, end)

    def _answered(self, replica: SimulatedReplica, answer: TrafficRequest, now: float) -> None:
        if replica.number in self._loads:
            self._loads[replica.number] -= 1
        if answer.arrived >= self._warm_up_s:
            self._pending -= 1
            found, overhead_s = self._found, self._fleet.overhead_s
            assert answer.first_text_at is not None
            found.finished += 1
            found.retried += answer.attempts > 1
            found.tokens += answer.length
            found.prompt_tokens += len(answer.tokens)
            found.cached_tokens += answer.cached
            found.answer_s.append(now - answer.arrived + overhead_s)
            found.first_text_s.append(answer.first_text_at - answer.arrived + overhead_s)
            self._is_given_up = self._give_up(found)
        following = self._arrivals.next_turn(answer, now)
        if following is not None and following.arrived <= self._last_arrival:
            self._at(following.arrived, lambda at: self._arrive(following, at))

    # Replicas

    def _open_replica(self, now: float) -> None:
        number, self._made = self._made, self._made + 1
        self._replicas[number] = SimulatedReplica(number, self._fleet.shape)
        self._loads[number] = 0
        self._open.append(number)
        self._born[number] = now
        self._note(now)
        if self._fleet.mean_life_s < math.inf:
            dies = now + self._random.expovariate(1 / self._fleet.mean_life_s)
            self._at(dies, lambda at: self._fail(number, at))
        waiting, self._unrouted = self._unrouted, []
        for answer in waiting:
            self._route(answer, now)

    def _close_replica(self, number: int, now: float) -> None:
        replica = self._replicas.pop(number)
        self._draining.discard(number)
        self._take_no_more(number)
        self._alive_s += now - self._born.pop(number)
        self._busy_s += replica.busy_s
        self._row_s += replica.row_s
        self._note(now)

    def _take_no_more(self, number: int) -> None:
        if self._loads.pop(number, None) is not None:
            self._open.remove(number)

    def _fail(self, number: int, now: float) -> None:
        if number not in self._replicas:
            return
        lost = self._replicas[number].answers
        self._found.failures += 1
        self._close_replica(number, now)
        self._start(now)
        for answer in lost:
            answer.first_text_at = None  # a stream goes on where it stopped: the time of the first text stays
            self._route(answer, now)

    def _start(self, now: float) -> None:
        self._starting += 1

        def started(at: float) -> None:
            self._starting -= 1
            self._open_replica(at)

        self._at(now + self._fleet.start_s, started)

    def _scale(self, now: float) -> None:
        assert self._scaler is not None
        here = len(self._open) + self._starting
        requests = sum(replica.load for replica in self._replicas.values()) + len(self._unrouted)
        wanted = self._scaler.wanted(
            replicas=here, slots_each=self._fleet.shape.max_num_seqs, requests=requests, now=now
        )
        for _ in range(wanted - here):
            self._start(now)
        for number in sorted(self._open, key=self._loads.__getitem__)[: max(0, here - wanted)]:
            self._take_no_more(number)
            self._draining.add(number)
            if not self._replicas[number].load:
                self._close_replica(number, now)
        if now < self._last_arrival:
            self._at(now + _SCALE_EVERY_S, self._scale)

    def _note(self, now: float) -> None:
        self._found.num_replicas.append((now, len(self._replicas)))
