"""Lives of a whole server, HTTP layer and engine, in virtual time: the clients of `engine_life` over HTTP.

`PYTHONPATH=src:tests python tests/server_life.py 17` prints the life of seed 17, event by event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dgemma.server.app import create_app
from dgemma.server.http.settings import Settings
from dgemma.server.text import CheckpointText
from engine_life import QUIET_S, Client, Life, Scenario, World, random_scenario, tokenizer
from server.raw_client import RawClient
from virtual_time import VirtualLoop, run_virtually

COMPLETIONS = "/v1/completions"
MAX_CLIENTS = 12


@cache
def key_file() -> Path:
    """A key for each client: the engine then knows whose request it has. One file per test process."""
    path = Path(tempfile.mkdtemp(prefix="dgemma-keys-")) / "keys"
    path.write_text("".join(f"client-{n} key-{n}\n" for n in range(MAX_CLIENTS)))
    return path


def body_of(client: Client, *, stream: bool) -> dict[str, Any]:
    request, params = client.request, client.request.params
    body: dict[str, Any] = {
        "model": request.adapter or "dgemma",
        "prompt": list(request.prompt),
        "seed": request.seed,
        "max_tokens": params.max_tokens,
        "decode": params.decode,
        "max_denoising_steps": params.max_denoising_steps,
        "temperature": params.temperature,
        "end_tokens": list(params.end_tokens or ()),
        "stop": list(params.stop),
        "top_k": params.top_k,
        "logprobs": params.logprobs,
        "deadline_s": params.deadline_s,
        "logit_bias": {str(token): value for token, value in request.logit_bias},
        "stream": stream,
        "diffusing": (request.drafts and params.decode != "causal") or None if stream else None,
    }
    return {name: value for name, value in body.items() if value is not None}


@dataclass
class Exchange:
    """One request over HTTP, and what came back."""

    is_streamed: bool
    raw: RawClient | None = None
    has_left: bool = False

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [m for m in self._sent if m["type"] == "http.response.start"]

    @property
    def num_ends(self) -> int:
        return sum(m["type"] == "http.response.body" and not m.get("more_body") for m in self._sent)

    @property
    def status(self) -> int | None:
        return self.raw.status if self.raw is not None else None

    @property
    def events(self) -> list[str]:
        """Of a stream."""
        assert self.raw is not None
        lines = self.raw.body.decode().split("\n\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def error(self) -> dict[str, Any] | None:
        """What the client was told instead of an answer."""
        assert self.raw is not None
        if self.status == 200:
            last = [json.loads(event) for event in self.events if event != "[DONE]"][-1:]
            return last[0].get("error") if self.is_streamed and last else None
        found = json.loads(self.raw.body)
        return dict(found["error"]) if found.keys() == {"error"} else None

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The answer, whole or in parts."""
        assert self.raw is not None
        texts = self.events if self.is_streamed else [self.raw.body.decode()]
        parts = [json.loads(text) for text in texts if text != "[DONE]"]
        return [choice for part in parts for choice in part.get("choices", ())]

    @property
    def _sent(self) -> list[dict[str, Any]]:
        return self.raw.sent if self.raw is not None else []


class _Client(RawClient):
    """Takes in what is sent at its own pace, and may leave after some of it."""

    def __init__(self, world: ServerWorld, client: Client, exchange: Exchange) -> None:
        self._world, self._client, self._exchange = world, client, exchange
        number = client.name.rpartition(" ")[2]
        body = body_of(client, stream=exchange.is_streamed)
        headers = [(b"authorization", f"Bearer key-{number}".encode())]
        super().__init__(world.app, COMPLETIONS, body, headers=headers)

    async def _send(self, message: dict[str, Any]) -> None:
        await super()._send(message)
        self._world.note(f"{self._client.name} is sent {str(message)[:300]}")
        if len(self.sent) == self._client.leaves_after:
            self._exchange.has_left = True
            self.leave()
        await asyncio.sleep(self._client.pause_s)


class ServerWorld(World):
    """The world of the engine, with a server in front of it."""

    def __init__(
        self, seed: int, loop: VirtualLoop, life: Life, on_turn: Callable[[World, int], object] | None
    ) -> None:
        super().__init__(seed, loop, life, on_turn)
        drains = life.scenario.drains
        settings = Settings(
            api_key_file=key_file(),
            share_prefixes=True,
            drain_timeout_s=QUIET_S if drains is None else drains[1],
            request_timeout_s=QUIET_S / 2,
        )
        self.app = create_app(settings, self.service, CheckpointText(tokenizer(), None))
        self.exchanges: dict[str, Exchange] = {}
        self.streams = random.Random(f"streams {seed}")

    async def be(self, client: Client) -> None:
        exchange = self.exchanges[client.name] = Exchange(self.streams.random() < 0.5)
        await asyncio.sleep(client.arrives_s)
        exchange.raw = _Client(self, client, exchange)
        await asyncio.wait([exchange.raw.task])
        self.note(f"{client.name}: {exchange.status}")
        client.outcomes.append(self.outcome(exchange))

    def cut(self, client: Client, task: asyncio.Task[None]) -> None:
        """The client's connection is lost."""
        exchange = self.exchanges[client.name]
        if exchange.raw is not None and not exchange.raw.task.done():
            exchange.has_left = True
            exchange.raw.leave()

    def outcome(self, exchange: Exchange) -> str:
        if exchange.has_left:
            return "left"
        error = exchange.error
        return "answered" if error is None else f"{exchange.status} {error['code']}"

    async def drain(self, when: float, timeout_s: float) -> None:
        await asyncio.sleep(when)
        self.life.counts["drain"] += self.service.stats().slots_used > 0
        self.note(f"drain within {timeout_s} s")
        await self.app.state.drain()

    def check_balance(self, stats: Any) -> None:
        super().check_balance(stats)
        admission = self.app.state.admission
        if admission.num_active or admission._num_buffered_bytes:
            self.problem(f"still admitted: {admission.num_active}, {admission._num_buffered_bytes} bytes")
        metrics = self.app.state.metrics.requests.collect()
        num_counted = sum(s.value for family in metrics for s in family.samples if s.name.endswith("_total"))
        if num_counted != len(self.exchanges):
            self.problem(f"{len(self.exchanges)} requests, but {num_counted} were counted")


@dataclass
class ServerLife(Life):
    exchanges: dict[str, Exchange] = field(default_factory=dict)


def simulate(seed: int) -> ServerLife:
    return live(random_scenario(seed), seed)


def live(
    scenario: Scenario, seed: int = 0, on_turn: Callable[[World, int], object] | None = None
) -> ServerLife:
    life = ServerLife(scenario)
    for client in scenario.clients:  # a task of the client is not cancelled: its connection is lost
        client.closes = False

    async def lived(loop: VirtualLoop) -> None:
        world = ServerWorld(seed, loop, life, on_turn)
        life.exchanges = world.exchanges
        await world.run()

    logger = logging.getLogger("dgemma")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # a log line per request and per injected fault
    try:
        run_virtually(lived)
    except Exception as error:
        life.problems.append(f"{type(error).__name__}: {error}")
    finally:
        logger.setLevel(level)
    return life


if __name__ == "__main__":
    found = simulate(int(sys.argv[1]))
    print("\n".join(found.trace))
    print("\n".join(found.problems or ["no problems"]))
