"""A real server for tests: `dgemma serve` as a process of its own, with a random model and two adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

import dgemma
from adapters import SETTINGS, train
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from server.replicas import NUM_REPLICAS
from text.bundled import RICH_TEMPLATE

ADAPTERS = ("sums", "poems")
# Random weights never settle, so it is the number of steps that says how long an answer takes.
STEPS = 3
_REPLICAS = ("--replicas", str(NUM_REPLICAS)) if NUM_REPLICAS > 1 else ()


@dataclass(frozen=True)
class RealServer:
    """A server that listens."""

    address: str
    process: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> list[dict[str, Any]]:
        return _entries(self.log_file)

    def metric(self, name: str, key: str = "") -> float:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        text = httpx2.get(f"{self.address}/metrics", headers=headers, timeout=60).raise_for_status().text
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
        return float(line.split()[1])


def write_model(path: Path, *, steps: int = STEPS) -> Path:
    """A checkpoint in fp32 whose template knows tools and thinking, and whose answers take few steps."""
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    (path / "chat_template.jinja").write_text(RICH_TEMPLATE)
    defaults = path / "generation_config.json"
    defaults.write_text(json.dumps({**json.loads(defaults.read_text()), "max_denoising_steps": steps}))
    return path


def write_adapters(model: Path, path: Path) -> dict[str, Path]:
    """Adapters of the model as training would leave them, by name."""
    base = dgemma.load(model)
    for seed, name in enumerate(ADAPTERS):
        train(base.with_adapter(SETTINGS), seed=seed, size=1.0).save_adapter(path / name)
    return {name: path / name for name in ADAPTERS}


@contextmanager
def serving(
    *argv: str,
    command: Sequence[str] | None = None,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RealServer]:
    """`dgemma serve ARGV`, or a command that becomes it, on a free port, until the block ends."""
    with tempfile.TemporaryDirectory() as scratch:
        log_file = Path(scratch) / "log"
        # A file, not a pipe: nobody would empty it while requests are sent.
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command or [sys.executable, "-m", "dgemma.cli.main", "serve", *argv, *_REPLICAS],
                cwd=directory,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**_outside(), "OMP_NUM_THREADS": "1", "DGEMMA_PORT": "0", **(environment or {})},
            )
        try:
            port = _port_of(process, log_file)
            yield RealServer(f"http://127.0.0.1:{port}", process, log_file)
        finally:
            process.kill()
            process.wait()


def _outside() -> dict[str, str]:
    """Our own environment, but for what would set flags of the server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DGEMMA_")}


def _entries(log_file: Path) -> list[dict[str, Any]]:
    """The lines that are whole: the last one may still be written."""
    *lines, _ = log_file.read_text().split("\n")
    return [json.loads(line) for line in lines if NUM_REPLICAS == 1 or line.startswith("{")]


def _port_of(process: subprocess.Popen[bytes], log_file: Path, timeout_s: float = 120 * NUM_REPLICAS) -> int:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and process.poll() is None:
        for entry in _entries(log_file):
            if entry["event"] == "listening":
                return int(entry["port"])
        time.sleep(0.02)
    raise AssertionError(f"it does not listen: {log_file.read_text()}")
