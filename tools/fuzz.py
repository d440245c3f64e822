"""Coverage-guided fuzzing of everything that a stranger may hand to dgemma.

    python -m tools.fuzz safetensors --minutes 10        one target; Ctrl-C ends it, the next run goes on
    python -m tools.fuzz safetensors --replay FILE...    what becomes of these inputs
    python -m tools.fuzz --list                          the targets
    python -m tools.fuzz --record                        what all runs so far found, as a dated result file

Atheris (libFuzzer) mutates inputs and keeps those that reach new code of dgemma, Jinja and Pillow; they stay
in `build/fuzz/TARGET/corpus`. Only a `DgemmaError` may come out of a target, within its processor time and
512 MB more memory than a second before. Anything else is a finding: one for each place in the code, with its
smallest input and its traceback in `build/fuzz/TARGET/findings`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tools.fuzz_targets import ROOT, TARGETS, SlowError, Target

HOME = ROOT / "build" / "fuzz"
MEMORY_BYTES = 512 << 20
HANG_S = 120  # by the clock: an input that holds the interpreter so long ends the process
_WORDS = (b"null", b"true", b"-1", b"1e999", b"NaN", b"18446744073709551616", b'""', b"[]", b"{}", b"\\ud800")
_PACKAGE = str(ROOT / "src" / "dgemma")


class Watched:
    """Runs inputs within limits, and keeps what should not have come out."""

    def __init__(self, target: Target, findings: Path) -> None:
        from dgemma.errors import DgemmaError

        self._meant = (DgemmaError, KeyboardInterrupt, SystemExit)
        self._target = target
        self._findings = findings
        self.executions = 0
        signal.signal(signal.SIGVTALRM, self._too_slow)

    def _too_slow(self, number: int, frame: FrameType | None) -> None:
        raise SlowError(f"more than {self._target.seconds:g} s of processor time")

    def __call__(self, data: bytes) -> None:
        self.executions += 1
        error = self.outcome(data)
        if error is not None:
            self._keep(data, error)

    def outcome(self, data: bytes) -> BaseException | None:
        """What came out that should not have; None: a result, or an error that dgemma means."""
        signal.setitimer(signal.ITIMER_VIRTUAL, self._target.seconds)
        try:
            self._target.run(data)
        except self._meant:
            return None
        except BaseException as error:  # a panic of a Rust library is no Exception
            return error
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return None

    def _keep(self, data: bytes, error: BaseException) -> None:
        """The smallest input of each place."""
        place = place_of(error)
        directory = self._findings / hashlib.sha256(place.encode()).hexdigest()[:12]
        file = directory / "input"
        if file.exists() and file.stat().st_size <= len(data):
            return
        directory.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        told = "".join(traceback.format_exception(error))[-8000:]
        (directory / "traceback.txt").write_text(f"{place}\n\n{told}", errors="replace")


def place_of(error: BaseException) -> str:
    """Its type, and the deepest line of dgemma that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)] or list(frames)
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "nowhere"
    if isinstance(error, SlowError):  # the line is where its time ran out, by chance
        where = next((f"{Path(f.filename).name}:{f.name}" for f in ours), "nowhere")
    return f"{type(error).__name__} at {where}"


def minimized(data: bytes, is_same: Callable[[bytes], bool], seconds: float = 20.0) -> bytes:
    """Without the parts that the finding does not need."""
    ends, size = time.monotonic() + seconds, max(1, len(data) // 2)
    while size and time.monotonic() < ends:
        at = 0
        while at < len(data) and time.monotonic() < ends:
            shorter = data[:at] + data[at + size :]
            if is_same(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def words(seeds: list[bytes]) -> str:
    """libFuzzer's dictionary: the names, numbers and signs that the seeds are made of."""
    found = {word for seed in seeds for word in re.findall(rb"[A-Za-z_$|<>%{}.-]{3,24}", seed)}
    known = [*sorted(found)[:3000], *_WORDS]
    return "".join('"' + "".join(map("\\x{:02x}".format, word)) + '"\n' for word in known)


# --- the process that fuzzes


def fuzz_here(name: str, home: Path, seconds: int, seed: int) -> None:
    import atheris

    with tempfile.TemporaryDirectory() as scratch:
        with atheris.instrument_imports(
            include=["dgemma", "jinja2", "PIL"]
        ):  # so nothing of it is imported before
            from dgemma.worker_process import limit_memory

            target = TARGETS[name](Path(scratch))
            seeds = list(target.seeds)
            watched = Watched(target, home / "findings")
            for one in seeds:  # imports what is imported late
                watched(one)
        corpus = home / "corpus"
        for one in seeds:
            (corpus / hashlib.sha256(one).hexdigest()[:16]).write_bytes(one)
        (home / "words.dict").write_text(words(seeds))
        no_limit = resource.getrlimit(resource.RLIMIT_AS)
        limit_memory(MEMORY_BYTES)
        began = noted_at = time.monotonic()

        def one_input(data: bytes) -> None:
            nonlocal noted_at
            watched(data)
            if (now := time.monotonic()) - noted_at > 1:
                noted_at = now
                # Counted anew: what traces the coverage leaves some kB for each input.
                resource.setrlimit(resource.RLIMIT_AS, no_limit)
                limit_memory(MEMORY_BYTES)
                note = {
                    "executions": watched.executions,
                    "seconds": now - began,
                    "cpu_s": time.process_time(),
                }
                (home / "status.json").write_text(json.dumps(note))

        atheris.Setup(
            [
                "fuzz", str(corpus), f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={HANG_S}",
                f"-max_len={target.max_bytes}", f"-dict={home / 'words.dict'}", "-rss_limit_mb=4096",
                "-report_slow_units=100000",  # by the clock: a busy machine makes every input slow
                f"-artifact_prefix={home / 'crash'}/", "-len_control=20",
            ],
            one_input,
        )  # fmt: skip
        atheris.Fuzz()


# --- the process that a person starts


def fuzz(name: str, home: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Run until the time is over, also when an input ends the process -> the record of this run.

    The time does not count what passes before the first input.
    """
    for part in ("corpus", "findings", "crash"):
        (home / part).mkdir(parents=True, exist_ok=True)
    total = {"executions": 0, "seconds": 0.0, "cpu_s": 0.0}
    restarts = 0
    covered: list[int] = []
    is_over = False
    while not is_over and (left := 60 * minutes - total["seconds"]) > 0:
        (home / "status.json").unlink(missing_ok=True)
        run = ["-m", "tools.fuzz", name, "--child", str(int(left) + 1), "--seed", str(seed + restarts)]
        process = subprocess.Popen(
            [sys.executable, *run, "--home", str(home.parent)], cwd=ROOT, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        try:
            assert process.stderr is not None
            for line in followed(process.stderr, home / "log.txt"):
                covered += [int(number) for number in re.findall(r"\bcov: (\d+)", line)]
                show(name, home, total, covered)
            is_over = process.wait() == 0
        except KeyboardInterrupt:
            is_over = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = status(home)
        total = {field: value + found[field] for field, value in total.items()}
        restarts += not is_over
        if restarts > 50 or (not is_over and not found["executions"]):
            print(f"\nthe process ends by itself; see {home / 'log.txt'}")
            break
    print()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(total["seconds"]),
        "cpu_s": round(total["cpu_s"]),
        "seed": seed,
        "executions": total["executions"],
        "process_ended_by_an_input": restarts,
        "coverage_of_seeds": covered[0] if covered else 0,
        "coverage": covered[-1] if covered else 0,
        "corpus": len(list((home / "corpus").iterdir())),
    }


def followed(stream: Any, log: Path) -> Iterator[str]:
    with log.open("a") as file:
        for line in stream:
            file.write(line)
            yield line


def status(home: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((home / "status.json").read_text())
    except (OSError, ValueError):  # none yet, or half of it
        found = {"executions": 0, "seconds": 0.0, "cpu_s": 0.0}
    return found


def show(name: str, home: Path, before: dict[str, Any], covered: list[int]) -> None:
    now = {field: before[field] + value for field, value in status(home).items()}
    executions, seconds = now["executions"], now["seconds"]
    line = (
        f"{name}: {seconds:.0f} s, {executions:,} inputs ({executions / max(1, seconds):.0f}/s), "
        f"coverage {covered[-1] if covered else 0}, findings {len(findings_of(home))}"
    )
    on_screen = sys.stdout.isatty()
    print(f"\r{line:<100}" if on_screen else line, end="" if on_screen else "\n", flush=True)


def findings_of(home: Path) -> list[str]:
    """Places of findings, and inputs that ended the process."""
    places = [file.read_text().split("\n")[0] for file in sorted(home.glob("findings/*/traceback.txt"))]
    return places + [f"ended the process: {file.name}" for file in sorted(home.glob("crash/*"))]


def minimize_all(name: str, home: Path) -> None:
    with opened(name) as watched:
        for file in home.glob("findings/*/input"):
            data = file.read_bytes()
            error = watched.outcome(data)
            if error is None or isinstance(error, SlowError):
                continue
            place = place_of(error)

            def is_same(shorter: bytes, place: str = place) -> bool:
                found = watched.outcome(shorter)
                return found is not None and place_of(found) == place

            file.write_bytes(minimized(data, is_same))


@contextlib.contextmanager
def opened(name: str) -> Iterator[Watched]:
    with tempfile.TemporaryDirectory() as scratch:
        yield Watched(TARGETS[name](Path(scratch)), Path(scratch) / "findings")


def replay(name: str, files: list[Path]) -> int:
    """Whether one of them is a finding still."""
    worst = 0
    with opened(name) as watched:
        for file in files:
            error = watched.outcome(file.read_bytes())
            print(f"{file}: {'fine' if error is None else f'{place_of(error)}: {str(error)[:200]}'}")
            worst |= error is not None
    return worst


def record(home: Path) -> None:
    from benchmarks import record as results

    found = {}
    for file in sorted(home.glob("*/runs.jsonl")):
        runs = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.parent.name] = {
            "seconds": sum(run["seconds"] for run in runs),
            "cpu_s": sum(run["cpu_s"] for run in runs),
            "executions": sum(run["executions"] for run in runs),
            "coverage_of_seeds": runs[0]["coverage_of_seeds"],
            "coverage": max(run["coverage"] for run in runs),
            "corpus": max(run["corpus"] for run in runs),
            "findings": findings_of(file.parent),
            "had_ten_minutes": sum(run["seconds"] for run in runs) >= 600,
        }
    results.write("fuzz", {"targets": found}, module="tools.fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", nargs="?", choices=TARGETS, metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--home", type=Path, default=HOME, help="where corpora and findings are kept")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", type=int, metavar="SECONDS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for name, make in TARGETS.items():
            print(f"{name:12} {(make.__doc__ or '').splitlines()[0]}")
        return 0
    if args.record:
        record(args.home)
        return 0
    if args.target is None:
        parser.error("give a TARGET, --list or --record")
    home = args.home / args.target
    if args.child:
        fuzz_here(args.target, home, args.child, args.seed)
    if args.replay:
        return replay(args.target, args.replay)
    try:
        import atheris  # noqa: F401
    except ImportError:
        parser.error("needs atheris, which is for Linux: pip install atheris")
    found = fuzz(args.target, home, args.minutes, args.seed)
    with (home / "runs.jsonl").open("a") as file:
        file.write(json.dumps(found) + "\n")
    minimize_all(args.target, home)
    print(json.dumps(found | {"findings": findings_of(home)}, indent=2))
    return int(bool(findings_of(home)))


if __name__ == "__main__":
    sys.exit(main())
