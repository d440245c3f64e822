"""Commands killed at random moments: the next start goes on to the same result, or refuses by name.

    python -m benchmarks.kill_points --moments 200        (--only train run-batch quantize merge export new)

Each command runs in a forked child on a tiny model, is killed with SIGKILL at a moment drawn evenly from its
duration, and is started again. In two thirds of the cases the newest file loses its end first, as by a power
cut: cut off, or zeros. Never acceptable: another result than that of an uninterrupted run, a crash, or a
damaged directory that opens as a checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import open_checkpoint
from dgemma.cli.main import main as run_command
from dgemma.errors import DgemmaError
from dgemma.loading import load
from dgemma.model.lora import LoraSettings
from dgemma.training import trainer
from dgemma.training.report import read_log

# What the commands import when they run, so that a fork begins with it.
WARM = (
    "fastapi", "uvicorn", "yaml", "pydantic.type_adapter", "torch.profiler", "torch._dynamo",
    "dgemma.checkpoint.export", "dgemma.checkpoint.merge", "dgemma.cli.export", "dgemma.cli.merge",
    "dgemma.cli.new",
    "dgemma.cli.quantize", "dgemma.cli.run_batch", "dgemma.cli.train", "dgemma.checkpoint.quantized.writer",
    "dgemma.server.batch.serving", "dgemma.server.state", "dgemma.engine.async_engine", "dgemma.server.text",
)  # fmt: skip
DAMAGES = ("none", "cut", "zeros")
_MOST_LOST = 4096  # bytes at the end of the newest file


@dataclass(frozen=True)
class Target:
    """A command, and what its result is."""

    argv: Callable[[Path], list[str]]  # (output) -> arguments
    result: Callable[[Path], str]  # (output) -> a digest of all that a user gets
    is_checkpoint: bool = True


@dataclass(frozen=True)
class Ended:
    status: int  # negative: of the signal
    text: str
    seconds: float


def in_child(argv: list[str], log: Path, kill_after: float | None = None) -> Ended:
    """Run a command in a fork of this process, and kill it after so many seconds."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            status = run_command(argv)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException as error:  # what a user would see as a traceback
            os.write(2, f"unhandled {error!r}\n".encode())
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)  # not yet waited for, so the number is still the child's
    _, raw = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(raw), log.read_text(), time.monotonic() - began)


def damage(out: Path, how: str, draw: random.Random) -> str | None:
    """Take the end of the newest file -> its name."""
    files = [out] if out.is_file() else [file for file in out.rglob("*") if file.is_file()]
    files = [file for file in files if file.suffix != ".partial"]  # which nothing goes on from
    if how == "none" or not files:
        return None
    file = max(files, key=lambda file: file.stat().st_mtime_ns)
    content = file.read_bytes()
    kept = len(content) - draw.randint(1, max(1, min(_MOST_LOST, len(content))))
    file.write_bytes(content[:kept] + bytes(len(content) - kept) * (how == "zeros"))
    return file.name


def judge(target: Target, out: Path, ended: Ended, expected: str, damaged: str | None) -> str:
    """What the next start did; what begins with `wrong` must not happen."""
    if ended.status == 0:
        return "same result" if target.result(out) == expected else "wrong: another result"
    if ended.status != 1 or str(out) not in ended.text or "unhandled" in ended.text:
        return f"wrong: status {ended.status}, {ended.text[-300:]}"
    if target.is_checkpoint:
        try:
            open_checkpoint(out)
        except DgemmaError:
            return "refused: incomplete"
        if target.result(out) != expected:
            return f"wrong: opens with {damaged} damaged"
        return "refused: complete already"
    return "refused: incomplete"


def measure(name: str, target: Target, moments: int, scratch: Path) -> dict[str, Any]:
    draw = random.Random(name)
    out, log = scratch / name / "out", scratch / f"{name}.log"
    out.parent.mkdir()
    whole = [in_child(target.argv(out.with_name(f"whole-{k}")), log) for k in range(3)]
    if any(ended.status for ended in whole):
        raise RuntimeError(f"{name} fails uninterrupted: {whole[0].text}")
    expected, *others = (target.result(out.with_name(f"whole-{k}")) for k in range(3))
    if others != [expected, expected]:
        raise RuntimeError(f"{name} has no single result: {expected}, {others}")
    duration = statistics.median(ended.seconds for ended in whole)
    counts, lost, wrong = Counter[str](), Counter[str](), []
    num_killed = 0
    for number in range(moments):
        moment, how = draw.uniform(0, duration), DAMAGES[number % len(DAMAGES)]
        ended = in_child(target.argv(out), log, kill_after=moment)
        num_killed += ended.status == -signal.SIGKILL
        damaged = damage(out, how, draw) if out.exists() else None
        if damaged is not None:
            lost[damaged] += 1
        verdict = judge(target, out, in_child(target.argv(out), log), expected, damaged)
        if verdict.startswith("wrong"):
            wrong.append({"moment_s": round(moment, 4), "damage": [how, damaged], "verdict": verdict})
        counts[verdict.partition(",")[0]] += 1
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    return {
        "moments": moments,
        "killed_while_running": num_killed,
        "uninterrupted_s": round(duration, 3),
        "next_start": dict(counts),
        "damaged_files": dict(lost),
        "wrong": wrong,
    }


def files_digest(out: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(out.iterdir()):
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def training_digest(out: Path) -> str:
    """The adapter, the weights and moments of the last state, the steps of the log."""
    state = max((out / "states").iterdir())
    steps = [report.step for report in read_log(out / "log.jsonl")]
    assert steps == sorted(set(steps))
    parts = [files_digest(out / "adapter"), state.name, (state / "state.safetensors").read_bytes().hex()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def results_digest(out: Path) -> str:
    """The answers by their request, without ids and times."""
    found = {}
    for line in out.read_text().splitlines():
        result = json.loads(line)
        assert result["custom_id"] not in found
        response = result["response"]
        found[result["custom_id"]] = (response["status_code"], response["body"].get("choices"))
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def targets(scratch: Path) -> dict[str, Target]:
    model, adapter = scratch / "model", scratch / "adapter"
    # In a child: a process that has run a model must not fork.
    if os.fork() == 0:
        write_random(model, PRESETS["tiny"].config, seed=1)
        load(model).with_adapter(LoraSettings(rank=2)).save_adapter(adapter)
        os._exit(0)
    os.wait()
    data, requests = scratch / "data.jsonl", scratch / "requests.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{k}?", "response": f"it is {k}"}) for k in range(8)))
    options = {"model": "model", "max_tokens": 8, "max_denoising_steps": 2}
    bodies = [{**options, "prompt": f"{k}:", "seed": k} for k in range(8)]
    requests.write_text(
        "\n".join(
            json.dumps({"custom_id": str(k), "method": "POST", "url": "/v1/completions", "body": body})
            for k, body in enumerate(bodies)
        )
    )
    recipe = [f"model={model}", f"data.path={data}", "data.max_length=32", "steps=3", "batch=2"]
    recipe += ["precision=fp32", "saving.every=1", "lora.rank=2"]
    return {
        "quantize": Target(lambda out: ["quantize", str(model), str(out), "--no-report"], files_digest),
        "merge": Target(lambda out: ["merge", str(model), str(adapter), str(out)], files_digest),
        "export": Target(
            lambda out: ["export", str(model), str(out), "--adapter", str(adapter)], files_digest
        ),
        "new": Target(lambda out: ["new", str(out), "--quantize", "int8"], files_digest),
        "run-batch": Target(
            lambda out: ["run-batch", str(model), str(requests), str(out), "--exact"],
            results_digest,
            is_checkpoint=False,
        ),
        "train": Target(lambda out: ["train", *recipe, f"out={out}"], training_digest, is_checkpoint=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--moments", type=int, default=200, help="of each command (default: 200)")
    parser.add_argument("--only", nargs="*", help="commands (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in WARM:
        importlib.import_module(name)
    # Drawing takes longer than all the rest, and nothing goes on from its file.
    vars(trainer)["write_curves"] = lambda *_: Path()
    findings: dict[str, Any] = {}
    # In memory where there is such a place: a kill loses nothing that a disk would keep, and fsync is free.
    memory = Path("/dev/shm")  # noqa: S108
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        for name, target in targets(Path(made)).items():
            if not args.only or name in args.only:
                findings[name] = measure(name, target, args.moments, Path(made))
                record.write("kill_points", findings, "-".join(["", *(args.only or [])]))
    sys.exit(any(found["wrong"] for found in findings.values()))


if __name__ == "__main__":
    main()
