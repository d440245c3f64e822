"""A server process of our own for load tests: started, watched and ended; or one with a fault inside.

    python -m benchmarks.load_server FLAGS

serves like `dgemma serve bundled:text FLAGS`, but requests with certain seeds raise or hang inside a step.
The command itself has no such flag.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.load_client import ask
from benchmarks.load_traffic import MODEL

BUNDLED = "bundled:text"
_STARTS_WITHIN_S = 120.0
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") / 1024

# A poisoned seed says where its request fails, and after how many steps of a canvas.
POISON = 666_000_000
POINTS = ("forward", "sample", "_store_encoded", "_process_output")
# These seeds make a step hang, or run out of memory unless the request is alone in it.
HANG, NO_MEMORY = 555_000_000, 556_000_000


def poisoned_seed(point: str, after_steps: int, number: int) -> int:
    return POISON + 1000 * number + 10 * after_steps + POINTS.index(point)


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], within_s: float) -> None:
        self.process = process
        self._log = Path(log.name)
        self.port = self._wait(within_s)

    def entries(self) -> list[dict[str, Any]]:
        """Its log, as far as lines are whole. Those that are no JSON are somebody else's."""
        lines = self._log.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def rss_mb(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE_KB / 1024

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def metrics(self, headers: dict[str, str] | None = None) -> dict[str, float]:
        reply = await ask(self.port, "/metrics", headers=headers)
        lines = [line for line in reply.body.decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def in_use(self, headers: dict[str, str] | None = None) -> dict[str, float]:
        """What must be nothing when nobody asks."""
        names = (
            "dgemma_slots_in_use", "dgemma_kv_blocks_in_use", "dgemma_requests_waiting",
            "dgemma_requests_in_progress",
        )  # fmt: skip
        return {
            name: value for name, value in (await self.metrics(headers)).items() if name.startswith(names)
        }

    async def at_rest(
        self, patience_s: float = 60.0, headers: dict[str, str] | None = None
    ) -> dict[str, float]:
        """What is in use when that is nothing, or when patience is at its end."""
        ends_at = time.monotonic() + patience_s
        while any((used := await self.in_use(headers)).values()) and time.monotonic() < ends_at:
            await asyncio.sleep(0.05)
        return used

    def _wait(self, within_s: float) -> int:
        ends_at = time.monotonic() + within_s
        while time.monotonic() < ends_at and self.process.poll() is None:
            for entry in self.entries():
                if entry.get("event") == "listening":
                    return int(entry["port"])
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start: {self._log.read_text()[-2000:]}")


@contextmanager
def served(
    flags: Sequence[str] = (),
    *,
    threads: int | None = None,
    poisoned: bool = False,
    key: str = "",
    exact: bool = True,
    starts_within_s: float = _STARTS_WITHIN_S,
    ends_within_s: float = 5.0,
) -> Iterator[Served]:
    """A server of the bundled text model, until the block is left, in whatever way."""
    module = ["benchmarks.load_server"] if poisoned else ["dgemma.cli.main", "serve", BUNDLED]
    own = ["--port", "0", "--served-model-name", MODEL, "--max-model-len", "2048"]
    own += ["--exact"] if exact else []
    env = {**os.environ, "DGEMMA_API_KEY": key}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *own, *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            cwd=Path(__file__).parents[1],
        )
        try:
            server = Served(process, log, starts_within_s)
            yield server
        finally:
            if process.poll() is None:
                end(process, ends_within_s)


KEYS = {"good": "good-key", "bad": "bad-key"}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


@contextmanager
def two_keys(flags: Sequence[str], *, threads: int | None = None) -> Iterator[Served]:
    """A server with two API keys."""
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.writelines(f"{name} {key}\n" for name, key in KEYS.items())
        file.flush()
        with served([*flags, "--api-key-file", file.name], threads=threads) as server:
            yield server


def end(process: subprocess.Popen[bytes], within_s: float = 5.0) -> None:
    """A signal to drain, a second to end at once, and one that nobody ignores."""
    for signal in (process.terminate, process.terminate, process.kill):
        signal()
        try:
            process.wait(within_s)
            return
        except subprocess.TimeoutExpired:
            continue


def serve_poisoned() -> None:
    """As `dgemma.cli.serve` does it, with a fault in the engine."""
    import torch

    from dgemma.cli import serve as command
    from dgemma.cli.server_options import LOAD_FLAGS, SERVER_FLAGS, open_service, read_flags
    from dgemma.engine.async_engine import AsyncEngine
    from dgemma.server.http.log import LOGGER, configure_log
    from dgemma.server.http.settings import LoadOptions, Settings
    from dgemma.server.run import listen, serve

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([BUNDLED, *sys.argv[1:]])
    settings = read_flags(Settings, SERVER_FLAGS, args, served_model_name=MODEL)
    options = read_flags(LoadOptions, LOAD_FLAGS, args)
    with listen(settings.host, settings.port) as listener:
        configure_log(sys.stderr)
        service, text = open_service(
            BUNDLED, options, settings, queue_len=settings.queue_len, log=LOGGER.info
        )
        assert isinstance(service, AsyncEngine)
        engine = service._engine

        def fault(point: str, numbers: Sequence[int]) -> None:
            for sequence in map(engine._sequences.get, numbers):
                if sequence is None:  # finished: a point after the last computation
                    continue
                seed = sequence.request.seed
                if seed == HANG:
                    time.sleep(1e6)
                if seed == NO_MEMORY and point == "forward" and len(numbers) > 1:
                    raise torch.OutOfMemoryError("out of memory, by a test")
                poison = seed - POISON
                if poison >= 0 and POINTS[poison % 10] == point and sequence.steps >= poison // 10 % 100:
                    raise RuntimeError(f"poison at {point}")

        engine._fault = engine._batches._fault = fault
        serve(settings, service, text, listener)


if __name__ == "__main__":
    serve_poisoned()
