"""Lives of an engine: clients, faults, full memory and a clock, all from one seed. What went wrong is listed.

`PYTHONPATH=src:tests python tests/engine_life.py 17` prints the life of seed 17, event by event.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from typing import Any

import torch

from dgemma.checkpoint.load import place
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.random_weights import distribution
from dgemma.engine.async_engine import AsyncEngine, StepOutputs
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import BlockTable, KVCacheManager, max_window_blocks
from dgemma.engine.model_runner import scan_rows, scan_tokens
from dgemma.engine.prefix_cache import BlockHashChain
from dgemma.engine.request import EngineRequest, ValidatedRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Accepted, BusyError, EngineEvent, EngineStats, ServedModel
from dgemma.errors import DgemmaError
from dgemma.events import Answer, Timings
from dgemma.language_model import LanguageModel
from dgemma.model.config import LayerKind, LayerShape, ModelConfig, RopeShape
from dgemma.model.execution import Execution
from dgemma.model.lora import LoraSettings, attach, lora_parameters
from dgemma.model.transformer import Transformer
from dgemma.params import Decode, GenerationParams
from dgemma.text.tokenizer import Tokenizer
from plain_answer import Read, plain_answer
from toy_transformer import ToyTransformer
from virtual_time import VirtualLoop, run_virtually

CONFIG = ModelConfig(
    vocab_size=512, hidden_size=16, mlp_size=16, num_heads=2, window=8, canvas_len=4, max_positions=128,
    layers=tuple(LayerShape(kind=kind, num_kv_heads=1, head_dim=8) for kind in LayerKind),
    rope={kind: RopeShape(theta=1e4, rotated_share=1.0) for kind in LayerKind},
    num_experts=2, experts_per_token=1, expert_size=8, norm_eps=1e-6, logit_cap=30.0,
)  # fmt: skip
ENCODE_BLOCK = 8
LONGEST = 24  # tokens that a context of the questions below may hold
QUESTIONS = 48
CAUSAL_WAYS: tuple[Decode, ...] = ("causal", "lossless", "auto")  # all write the causal text
BATCH_POINTS = ("forward", "sample")  # where the engine lets a test raise: for several requests at a time,
POINTS = (
    *BATCH_POINTS,
    "_store_encoded",
    "_process_output",
    "_expire",
)  # and for one; each before it computes, and after
DONE = "_done"  # the suffix of a point after computing
QUIET_S = 1000.0  # by then everything has come to rest
STEP_TIMEOUT_S = 30.0


@cache
def tiny_models() -> dict[str | None, LanguageModel]:
    """The smallest model that has all parts, alone and under an adapter; exact, so that company is unseen."""
    execution = Execution(exact=True, encode_block=ENCODE_BLOCK, expert_tile=4)
    stack = Transformer(CONFIG, dtype=torch.float32, device="cpu", execution=execution)
    generator = torch.Generator().manual_seed(1)
    for spec in tensor_specs(CONFIG):
        mean, spread = distribution(spec)
        place(stack, spec.path, torch.randn(spec.shape, generator=generator) * spread + mean)
    other = attach(stack, LoraSettings(rank=2, expert_rank=1), seed=1)
    with torch.no_grad():
        for name, factor in lora_parameters(other).items():
            if name.endswith(".up"):
                factor.copy_(torch.randn(factor.shape, generator=generator))
    return {None: LanguageModel(stack), "other": LanguageModel(other)}


@cache
def toy_models() -> dict[str | None, LanguageModel]:
    """As many models, whose forwards cost a tenth."""
    execution = Execution(exact=True, encode_block=ENCODE_BLOCK)
    toys = {None: 1, "other": 2}
    return {name: LanguageModel(ToyTransformer(CONFIG, execution, seed=seed)) for name, seed in toys.items()}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(str(resources.files("dgemma") / "data" / "tokenizer"))


def make_engine(
    memory: KVCacheManager, limits: SchedulerConfig, kind: type[Engine] = Engine, **options: Any
) -> Engine:
    stacks = {name: lm.transformer for name, lm in toy_models().items()}
    return kind(stacks, memory, limits, tokenizer=tokenizer(), **options)


def serve(engine: Engine, **options: Any) -> AsyncEngine:
    model = ServedModel(
        max_positions=CONFIG.max_positions,
        canvas_len=CONFIG.canvas_len,
        vocab_size=CONFIG.vocab_size,
        adapters=("other",),
    )
    return AsyncEngine(engine, model, **options)


def question(number: int) -> EngineRequest:
    """One of a few questions, so that their answers are computed once; many begin alike."""
    rng = random.Random(f"question {number}")
    root = [2, *(300 + rng.randrange(2) for _ in range(4)), 106, *range(200, 204)]
    prompt = root[: rng.randint(1, 10)] + [rng.randrange(512) for _ in range(rng.randrange(4))]
    is_causal = rng.random() < 0.3
    params = GenerationParams(
        max_tokens=rng.randint(1, 9) if is_causal else rng.choice((1, 3, 4, 4, 6, 8, 11)),
        decode=CAUSAL_WAYS[number % 3] if is_causal else "diffuse",
        max_denoising_steps=rng.choice((1, 3, 3, 3)),
        temperature=rng.choice((0.0, 0.0, 1.0)),
        end_tokens=(1, 106, *range(400, 420)),
        stop=("a",) if rng.random() < 0.2 else (),
        top_k=5 if rng.random() < 0.1 else None,
        logprobs=2 if rng.random() < 0.1 else None,
    )
    return EngineRequest(
        prompt=tuple(prompt),
        seed=rng.randrange(1 << 32),
        params=params,
        adapter="other" if rng.random() < 0.15 else None,
        logit_bias=((3, -100.0), (300 + rng.randrange(9), 9.0)) if rng.random() < 0.2 else (),
    )


@cache
def alike_questions() -> tuple[int, ...]:
    """Questions whose canvases take several steps and are sampled in one batch: they share their options."""
    several = [n for n in range(QUESTIONS) if max(answer_alone(question(n)).steps, default=0) > 1]
    groups: dict[Any, list[int]] = {}
    for number in several:
        asked = question(number)
        params = asked.params
        narrow = (params.temperature > 0, params.top_k, params.logprobs)
        options = (narrow, bool(asked.logit_bias), asked.adapter)
        groups.setdefault(options, []).append(number)
    return tuple(max(groups.values(), key=len))


def answer_alone(request: EngineRequest) -> Answer:
    """What the plain twin says, in no hurry and with nobody beside it."""
    decode = "causal" if request.params.decode in CAUSAL_WAYS else request.params.decode
    params = replace(request.params, deadline_s=None, decode=decode)
    return _answer_alone(replace(request, params=params, id="", drafts=False, priority=0))


def as_alone(answer: Answer) -> Answer:
    """Without what depends on company, and on which way the causal text was written."""
    same = replace(answer, timings=Timings(), cached_tokens=0)
    if answer.decode in CAUSAL_WAYS:
        same = replace(same, decode="causal", steps=(), accepted=(), causal_tokens=len(answer.tokens))
    return same


@cache
def _answer_alone(request: EngineRequest) -> Answer:
    read: Read = scan_rows
    read_token: Read = scan_tokens
    if request.logit_bias:
        bias = torch.zeros(1, CONFIG.vocab_size)
        for word, value in request.logit_bias:
            bias[0, word] = value
        read, read_token = partial(scan_rows, bias=bias), partial(scan_tokens, bias=bias)
    lm = toy_models()[request.adapter]
    return plain_answer(
        lm,
        request.prompt,
        seed=request.seed,
        params=request.params,
        tokenizer=tokenizer(),
        read=read,
        read_token=read_token,
    )


@dataclass
class Client:
    """Somebody who asks, and how long they listen."""

    request: EngineRequest  # its id is the client's name
    is_valid: bool = True
    arrives_s: float = 0.0
    pause_s: float = 0.0  # between two events
    leaves_after: int | None = None  # events
    closes: bool = True  # when it leaves; else the stream is dropped as it is
    cancelled_s: float | None = None  # behind its arrival
    events: list[EngineEvent] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)  # one, in the end
    error: Exception | None = None
    is_pausing: bool = False

    @property
    def name(self) -> str:
        return self.request.id

    @property
    def outcome(self) -> str:
        return self.outcomes[0] if self.outcomes else "nothing happened"


@dataclass
class Fault:
    """Raises when the engine comes to `point` with the request for the `visit`-th time, and ever after.

    A passing one raises once, and only for several at a time: tried alone, all of them are well.
    """

    point: str
    visit: int = 0
    passing: bool = False
    error: Exception = field(default_factory=lambda: RuntimeError("a fault of the test"))
    visits: int = 0
    struck: bool = False

    def happens(self, point: str, company: int) -> bool:
        if point != self.point or (self.passing and (self.struck or company == 1)):
            return False
        self.visits += 1
        if self.visits <= self.visit:
            return False
        self.struck = self.struck or self.passing or company == 1
        return True


@dataclass
class Scenario:
    memory: dict[str, Any]  # what Memory is made of
    limits: SchedulerConfig
    clients: list[Client]
    faults: dict[str, Fault] = field(default_factory=dict)  # by the client's name
    max_waiting: int = 8
    dies_at: int | None = None  # the step that takes the engine with it
    hangs_at: int | None = None  # the step that never ends
    restarts: bool = False  # there is another engine to go on with
    drains: tuple[float, float] | None = None  # when, and how long it may take
    jumps: tuple[float, float] | None = None  # when the clock jumps, and how far


@dataclass
class Life:
    """What happened, and what should not have."""

    scenario: Scenario
    trace: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    repeated: set[str] = field(default_factory=set)  # clients whose part of a batch was computed again
    stats: EngineStats = field(default_factory=EngineStats)  # when all was quiet


class _Memory(KVCacheManager):
    num_full = 0  # times that there was no room for a sequence
    num_let_go = 0  # blocks of earlier prompts

    def allocate(self, chain: BlockHashChain, num_tokens: int, reusable: int) -> BlockTable | None:
        found = super().allocate(chain, num_tokens, reusable)
        self.num_full += found is None
        return found

    def extend(self, table: BlockTable, length: int) -> None:
        kept = len(self.prefix_cache)
        super().extend(table, length)
        self.num_let_go += kept - len(self.prefix_cache)


class _Engine(Engine):
    """Knows its clients, and that nobody may touch it during a step."""

    in_step = False
    names: dict[int, str]
    problems: list[str]
    on_add: Callable[[str], None]

    def add(self, validated: ValidatedRequest, *, arrived: float | None = None) -> int:
        request = validated.request
        # Over HTTP each client has a key of its name, and the server makes the ids.
        name = request.tenant.replace("-", " ") or request.id
        self.on_add(name)
        number = super().add(validated, arrived=arrived)
        self.names[number] = name
        self._must_rest(f"{name} was added")
        return number

    def cancel(self, number: int) -> None:
        super().cancel(number)
        self._must_rest(f"{self.names[number]} was cancelled")

    def _must_rest(self, what: str) -> None:
        if self.in_step:
            self.problems.append(f"{what} during a step")


def random_scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    block_size = rng.choice((2, 4, 8))
    blocks, window_blocks = -(-LONGEST // block_size), max_window_blocks(CONFIG.window, block_size)
    memory = {
        "block_size": block_size,
        "full_blocks": blocks + rng.randint(0, rng.choice((blocks // 2, 3 * blocks))),
        "window_blocks": window_blocks + rng.randint(0, 2 * window_blocks),
        "max_gathered": rng.choice((None, LONGEST + rng.randint(0, LONGEST))),
        "reuse": rng.random() < 0.8,
    }
    limits = SchedulerConfig(
        max_num_seqs=rng.choice((1, 2, 3, 4, 4)),
        chunk_size=rng.choice((8, 16)),
        encode_block=ENCODE_BLOCK,
        patience_s=rng.choice((0.1, 10.0)),
    )
    # Alike ones share every batch: there a fault of one may touch the others.
    questions = alike_questions() if rng.random() < 0.4 else range(QUESTIONS)
    clients = [_random_client(rng, f"client {number}", questions) for number in range(rng.randint(5, 12))]
    faults: dict[str, Fault] = {}
    for client in rng.sample(clients, rng.randint(0, 3)):
        point = rng.choice((*BATCH_POINTS, *POINTS, "add"))
        passing = point in BATCH_POINTS and rng.random() < 0.5
        visit = 0 if passing or point in ("_expire", "add") else rng.randrange(3)
        if point == "_expire":
            hurried = replace(client.request.params, deadline_s=rng.uniform(0.0, 0.5))
            client.request = replace(client.request, params=hurried)
        point += DONE if point != "add" and rng.random() < 0.5 else ""
        faults[client.name] = Fault(
            point,
            visit=visit,
            passing=passing,
            error=rng.choice((RuntimeError, AssertionError, KeyError, MemoryError))(f"at {point}"),
        )
    if rng.random() < 0.4:  # an unsteady device
        for client in clients:
            point = rng.choice(BATCH_POINTS) + rng.choice(("", DONE))
            faults.setdefault(client.name, Fault(point, visit=rng.randrange(3), passing=True))
    return Scenario(
        memory=memory,
        limits=limits,
        clients=clients,
        faults=faults,
        max_waiting=rng.choice((0, 1, 2, 4, 8)),
        dies_at=rng.randrange(12) if rng.random() < 0.12 else None,
        hangs_at=rng.randrange(12) if rng.random() < 0.06 else None,
        restarts=rng.random() < 0.5,
        drains=(rng.uniform(0.0, 1.5), rng.choice((0.1, QUIET_S))) if rng.random() < 0.15 else None,
        jumps=(rng.uniform(0.0, 1.5), rng.uniform(0.0, 0.6 * STEP_TIMEOUT_S)) if rng.random() < 0.2 else None,
    )


def _random_client(rng: random.Random, name: str, questions: Sequence[int]) -> Client:
    request = replace(
        question(rng.choice(questions)),
        id=name,
        drafts=rng.random() < 0.3,
        priority=rng.choice((0, 0, 0, -1, 5)),
    )
    if rng.random() < 0.15:
        request = replace(request, params=replace(request.params, deadline_s=rng.uniform(0.0, 1.0)))
    is_valid = rng.random() > 0.08
    if not is_valid:
        wrong: list[dict[str, Any]] = [
            {"prompt": ()},
            {"prompt": (5, CONFIG.vocab_size)},
            {"prompt": tuple(range(100))},  # there is no memory for it
            {"adapter": "unknown"},
            {"params": GenerationParams(max_tokens=1000)},
        ]
        request = replace(request, **rng.choice(wrong))
    behaviour = rng.choice(("reads", "reads", "is slow", "leaves", "is cancelled"))
    return Client(
        request,
        is_valid=is_valid,
        arrives_s=rng.choice((0.0, rng.uniform(0.0, 1.5))),
        pause_s=rng.uniform(0.0, 0.3) if behaviour == "is slow" or rng.random() < 0.2 else 0.0,
        leaves_after=rng.randint(1, 4) if behaviour == "leaves" else None,
        closes=rng.random() < 0.7,
        cancelled_s=rng.uniform(0.0, 0.6) if behaviour == "is cancelled" else None,
    )


def simulate(seed: int) -> Life:
    return live(random_scenario(seed), seed)


def live(scenario: Scenario, seed: int = 0, on_turn: Callable[[World, int], object] | None = None) -> Life:
    """on_turn: called in every turn of the loop."""
    life = Life(scenario)
    try:
        run_virtually(lambda loop: World(seed, loop, life, on_turn).run())
    except Exception as error:
        life.problems.append(f"{type(error).__name__}: {error}")
    return life


class World:
    def __init__(
        self, seed: int, loop: VirtualLoop, life: Life, on_turn: Callable[[World, int], object] | None
    ) -> None:
        scenario = life.scenario
        self.scenario, self.loop, self.life = scenario, loop, life
        self.rng = random.Random(f"steps {seed}")
        self.memories: list[_Memory] = []
        self.engine = self.new_engine()
        self.service = serve(
            self.engine,
            max_waiting=scenario.max_waiting,
            make_engine=self.restarted if scenario.restarts else None,
            step_timeout_s=STEP_TIMEOUT_S,
            run_step=self.run_step,
            clock=loop.time,
        )
        self.num_steps = 0
        self.departed: set[str] = set()  # clients that closed their stream
        self.tasks: list[asyncio.Task[None]] = []
        loop.on_turn = lambda turn: self.turn(turn, on_turn)

    def new_engine(self) -> _Engine:
        self.memories.append(_Memory(window=CONFIG.window, **self.scenario.memory))
        limits, clock = self.scenario.limits, self.loop.time
        engine = make_engine(self.memories[-1], limits, _Engine, clock=clock, fault=self.fault)
        assert isinstance(engine, _Engine)
        engine.names, engine.problems = {}, self.life.problems
        engine.on_add = lambda name: self.strike("add", [name])
        return engine

    def restarted(self) -> _Engine:
        self.note("the engine is restarted")
        self.life.counts["restart"] += 1
        self.engine = self.new_engine()
        return self.engine

    def note(self, what: str) -> None:
        self.life.trace.append(f"{self.loop.now:.6f} {what}")

    def problem(self, what: str) -> None:
        self.life.problems.append(what)
        self.note(f"PROBLEM: {what}")

    def turn(self, turn: int, on_turn: Callable[[World, int], object] | None) -> None:
        if turn > 20_000:
            raise RuntimeError("this life never ends")
        if on_turn is not None:
            on_turn(self, turn)

    def fault(self, point: str, numbers: Sequence[int]) -> None:
        """What the engine calls where something may go wrong. Computing takes its time, in place."""
        if point == "forward":
            self.loop.now += self.rng.uniform(0.0, 0.05)
        self.strike(point, [self.engine.names[number] for number in numbers])

    def strike(self, point: str, names: Sequence[str]) -> None:
        for name in names:
            fault = self.scenario.faults.get(name)
            if fault is not None and fault.happens(point, len(names)):
                self.note(f"{point} fails for {', '.join(names)}")
                self.life.counts["failed in company"] += len(names) > 1
                self.life.counts[f"raised {'after' if point.endswith(DONE) else 'before'} computing"] += 1
                self.life.repeated |= {*names} if len(names) > 1 else set()
                raise fault.error

    async def run_step(self, step: Callable[[], StepOutputs]) -> StepOutputs:
        self.engine.in_step = True
        for number in self.engine._sequences:
            if self.engine.names[number] in self.departed:
                self.problem(f"{self.engine.names[number]} is gone, and still has a part in a step")
        await asyncio.sleep(self.rng.choice((0.0, self.rng.uniform(0.0, 0.05))))
        self.num_steps += 1
        if self.num_steps == self.scenario.hangs_at:
            self.note("the engine hangs")
            await asyncio.sleep(1e9)
        # A device that is gone stays gone, unless there is another engine.
        dies_at = self.scenario.dies_at
        is_over = dies_at is not None and self.num_steps > dies_at
        if is_over and (not self.scenario.restarts or self.num_steps == dies_at + 1):  # type: ignore[operator]
            await asyncio.sleep(0.2)  # somebody comes meanwhile
            self.note("the engine dies")
            raise OSError("the device is gone")
        told = step()
        self.note(f"step {self.num_steps}: {self.engine.num_computed} computed, {len(told)} events")
        await asyncio.sleep(self.rng.choice((0.0, self.rng.uniform(0.0, 0.02))))
        self.engine.in_step = False
        return told

    async def run(self) -> None:
        clients, drains = self.scenario.clients, self.scenario.drains
        self.tasks = [asyncio.create_task(self.be(client)) for client in clients]
        for client, task in zip(clients, self.tasks, strict=True):
            if client.cancelled_s is not None:
                self.loop.call_at(client.arrives_s + client.cancelled_s, self.cut, client, task)
        drain = None if drains is None else asyncio.create_task(self.drain(*drains))
        if self.scenario.jumps is not None:
            self.loop.call_at(self.scenario.jumps[0], self.jump, self.scenario.jumps[1])
        await asyncio.wait(self.tasks)
        for task in self.tasks:
            if not task.cancelled() and task.exception() is not None:
                self.problem(f"a client met {task.exception()!r}")
        if drain is not None:
            await drain
        await asyncio.sleep(QUIET_S)
        self.life.stats = self.service.stats()
        self.check_balance(self.life.stats)
        await self.service.drain(QUIET_S)
        await self.service.close()
        self.life.problems += self.loop.leftovers()
        self.life.counts["wait for blocks"] += sum(memory.num_full for memory in self.memories)
        self.life.counts["block let go"] += sum(memory.num_let_go for memory in self.memories)

    def cut(self, client: Client, task: asyncio.Task[None]) -> None:
        """What happens to a client is up to the world it lives in."""
        task.cancel()

    def jump(self, seconds: float) -> None:
        """As where a virtual machine stood still."""
        self.note(f"the clock jumps by {seconds} s")
        self.life.counts["jump with requests"] += self.service.stats().slots_used > 0
        self.loop.now += seconds

    async def drain(self, when: float, timeout_s: float) -> None:
        await asyncio.sleep(when)
        self.life.counts["drain"] += self.service.stats().slots_used > 0
        self.note(f"drain within {timeout_s} s")
        began = self.loop.now
        await self.service.drain(timeout_s)
        self.note("drained")
        stats = self.service.stats()
        is_over = stats.slots_used == stats.num_waiting == 0 or stats.failure is not None
        self.life.counts["drain that ran out of time"] += not is_over
        took_s = self.loop.now - began
        # A patient drain ends when the work does. The loop may be late by what a step computes in place.
        least_s, most_s = (0.0, min(timeout_s, 0.1 * QUIET_S)) if is_over else (timeout_s, timeout_s)
        most_s += self.scenario.jumps[1] if self.scenario.jumps is not None else 0.0
        if not least_s - 1e-6 < took_s < most_s + 0.5:
            self.problem(f"drain took {took_s} of {timeout_s} s and left {stats}")

    async def be(self, client: Client) -> None:
        """A client's life. Whatever happens, it has one outcome."""
        try:
            await asyncio.sleep(client.arrives_s)
            client.outcomes.append(await self.listen(client))
        except asyncio.CancelledError:
            client.outcomes.append("cancelled")
            raise
        except DgemmaError as error:
            client.outcomes.append(type(error).__name__)
            client.error = error
            # Nothing has happened since it was refused.
            if isinstance(error, BusyError) and (self.room() > 0 or error.retry_after_s < 1):
                self.problem(f"{client.name} was refused: {error} {self.service.stats()}")
        finally:
            if client.closes:
                self.departed.add(client.name)
            self.note(f"{client.name}: {client.outcomes}")

    async def listen(self, client: Client) -> str:
        stream = self.service.submit(client.request)
        closing: AbstractAsyncContextManager[Any] = aclosing(stream) if client.closes else nullcontext()
        async with closing:
            async for event in stream:
                client.events.append(event)
                self.note(f"{client.name}: {event}")
                if isinstance(event, Accepted) and self.room() < 0:
                    self.problem(f"{client.name} was accepted as one too many: {self.service.stats()}")
                if len(client.events) == client.leaves_after:
                    return "left"
                if client.pause_s:
                    client.is_pausing = True
                    await asyncio.sleep(client.pause_s)
                    client.is_pausing = False
        return "finished"

    def room(self) -> int:
        """How many more may be accepted now."""
        stats = self.service.stats()
        return self.scenario.max_waiting + stats.slots_total - stats.slots_used - stats.num_waiting

    def check_balance(self, stats: EngineStats) -> None:
        """Everybody is gone: so is what they had."""
        service = self.service
        if stats.failure is not None:
            return  # a dead engine gives nothing back
        used = (stats.slots_used, stats.full_blocks_used, stats.window_blocks_used, stats.num_waiting)
        if any(used):
            self.problem(f"somebody left something behind: {stats}")
        # Who leaves behind the end of a drain finds nobody to tell.
        gone = service._left if service._task is None or not service._task.done() else []
        if service._callers or service._new or gone:
            self.problem(f"forgotten: {service._callers}, {service._new}, {gone}")


if __name__ == "__main__":
    found = simulate(int(sys.argv[1]))
    print("\n".join(found.trace))
    print("\n".join(found.problems or ["no problems"]))
