"""A stranger's first hour: install the wheel, follow the README and the tutorials, make mistakes.

    python -m tools.newcomer            # all of it; writes docs/newcomer.md
    python -m tools.newcomer --in VENV  # the mistakes alone, in an environment made before; writes them too
    python -m tools.newcomer --here     # the mistakes alone, in this environment; writes nothing

In a copy of the tree and an empty environment, with an empty home. What a page says must come true word for
word; each mistake must end with the status and the message that `tools/newcomer_mistakes.py` expects, and
without a traceback. Exit status 1 if anything is wrong. A CPU build of torch has to be what `pip` finds.
"""

from __future__ import annotations

import argparse
import datetime
import doctest
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_hub import SHARDED, running_hub

from tools.newcomer_mistakes import MISTAKES, ON_HUB, PREPARED, Mistake
from tools.run_documented import ROOT, Block, blocks_of, copy_of_the_tree, empty_environment

PAGE = ROOT / "docs" / "newcomer.md"
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 300  # from nothing to a solved Sudoku and the first text of a stream
_SHELL = ("bash", "-euo", "pipefail", "-c")
_SOLVE = "dgemma solve 53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
_STREAM = "dgemma generate bundled:text 'On Sunday Emma and Tom' --raw --max-tokens 64 --seed 7"
_TUTORIALS = (
    "first-canvas", "json-out-of-text", "fill-and-edit", "fine-tune", "own-sampler", "replay-and-compare",
)  # fmt: skip
_END = "<end of block>"
_SESSION = f"""
import json, sys
names = {{}}
for line in sys.stdin:
    exec(json.loads(line), names)
    print({_END!r}, flush=True)
"""
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_PROGRESS = re.compile(r"^\w+: [\d.]+ of [\d.]+ \w+\n", re.MULTILINE)  # on a busy machine alone
_MISTAKE_LIMIT_S = 240
_MOST_LINES = 8


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str
    seconds: float


class Reader:
    """Types what a page says: shell blocks, Python blocks in one session, a server that stays."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self._directory, self._env = directory, env

    @contextmanager
    def _session(self) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            ["python", "-c", _SESSION], cwd=self._directory, env=self._env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as session:  # fmt: skip
            yield session
            assert session.stdin is not None
            session.stdin.close()

    def follow(self, page: str) -> tuple[int, list[str]]:
        """How many blocks were run, and what went wrong."""
        checker, wrong, count = doctest.OutputChecker(), list[str](), 0
        with ExitStack() as stack:
            session = stack.enter_context(self._session())
            for block in blocks_of(page):
                count += 1
                try:
                    printed = _PROGRESS.sub("", self._run(block, session, stack))
                except (subprocess.CalledProcessError, AssertionError) as error:
                    wrong.append(f"{block.text}--- failed: {error}")
                    break  # what follows needs it
                if block.prints is not None and not checker.check_output(block.prints, printed, _FLAGS):
                    wrong.append(f"{block.text}--- printed\n{printed}--- documented\n{block.prints}")
        return count, wrong

    def _run(self, block: Block, session: subprocess.Popen[str], stack: ExitStack) -> str:
        if block.language == "python":
            assert session.stdin is not None
            assert session.stdout is not None
            session.stdin.write(json.dumps(block.text) + "\n")
            session.stdin.flush()
            lines: list[str] = []
            for line in session.stdout:
                if line.rstrip("\n") == _END:
                    return "".join(lines)
                lines.append(line)
            raise AssertionError("Python ended")
        if block.text.startswith("dgemma serve"):
            stack.enter_context(self._server(block.text))
            return ""
        return subprocess.run(
            [*_SHELL, block.text], cwd=self._directory, env=self._env, check=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip

    @contextmanager
    def _server(self, text: str) -> Iterator[None]:
        with subprocess.Popen(
            [*_SHELL, "exec " + text], cwd=self._directory, env=self._env,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as server:  # fmt: skip
            try:
                while not is_taken(8000):
                    assert server.poll() is None, "the server ended"
                    time.sleep(0.2)
                yield
            finally:
                server.terminate()


def is_taken(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def first_steps(
    tree: Path, environment: Path, clean: dict[str, str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds from nothing to each first thing; and the variables of a shell in the environment."""
    began, times = time.perf_counter(), {}
    env = empty_environment(environment, clean)
    times["an empty environment"] = time.perf_counter() - began
    install = next(
        block for block in blocks_of((tree / "README.md").read_text()) if "pip install" in block.text
    )
    subprocess.run([*_SHELL, install.text], cwd=tree, env=env, check=True, stdout=subprocess.DEVNULL)
    times["the README's installation"] = time.perf_counter() - began
    solved = subprocess.run(
        [*_SHELL, _SOLVE], cwd=tree, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert re.fullmatch(r"[1-9]{81}\n", solved), solved
    times["a solved Sudoku"] = time.perf_counter() - began
    with subprocess.Popen([*_SHELL, _STREAM], cwd=tree, env=env, stdout=subprocess.PIPE) as stream:
        assert stream.stdout is not None
        assert stream.stdout.read(1)
        times["the first text of a stream"] = time.perf_counter() - began
        stream.stdout.read()
        times["the whole answer"] = time.perf_counter() - began
    assert stream.returncode == 0
    return times, env


def made(mistake: Mistake, directory: Path, env: dict[str, str]) -> Done:
    """What happens when somebody types it."""
    began = time.perf_counter()
    with open(directory / "stdout", "w+b") as out, open(directory / "stderr", "w+b") as err:
        text = f"exec {mistake.command}" if mistake.interrupt_at else mistake.command
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", text], cwd=directory, env=env, stdout=out, stderr=err,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

        def printed() -> str:
            return (directory / "stdout").read_text(errors="replace") + (directory / "stderr").read_text(
                errors="replace"
            )

        try:
            if mistake.interrupt_at:
                while not re.search(mistake.interrupt_at, printed()) and process.poll() is None:
                    if time.perf_counter() - began > _MISTAKE_LIMIT_S:
                        raise subprocess.TimeoutExpired(text, _MISTAKE_LIMIT_S)
                    time.sleep(0.1)
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGINT)
            status = process.wait(_MISTAKE_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    read = [(directory / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    return Done(status, read[0], read[1], time.perf_counter() - began)


def problems(mistake: Mistake, done: Done) -> list[str]:
    """What a person would complain about."""
    found = []
    if done.status != mistake.status:
        found.append(f"status {done.status} in place of {mistake.status}")
    if not re.search(mistake.says, done.out + done.err, re.DOTALL):
        found.append(f"it does not say {mistake.says!r}")
    if "Traceback" in done.err:
        found.append("a traceback")
    if mistake.status and len(message(done).splitlines()) > _MOST_LINES:
        found.append("too many lines")
    return found


def message(done: Done) -> str:
    """What is on the screen that matters: errors, else output; progress left out."""
    lines = [
        line
        for line in (done.err.strip() or done.out.strip()).splitlines()
        if line.strip() and not line.startswith(("Try: ", "writing: "))
    ]
    return "\n".join(line.rpartition("\r")[2] for line in lines)


def make_mistakes(
    directory: Path, env: dict[str, str], *, take_away: bool, keep: Path | None = None
) -> list[tuple[Mistake, Done]]:
    """All of them, in order. take_away: also uninstall what those at the end are without.

    keep: the temporary directory; the report is written after each.
    """
    with running_hub() as hub:
        hub.repos[ON_HUB] = SHARDED
        return _make_mistakes(directory, env | {"HUB": hub.address}, take_away, keep)


def _make_mistakes(
    directory: Path, env: dict[str, str], take_away: bool, keep: Path | None
) -> list[tuple[Mistake, Done]]:
    subprocess.run([*_SHELL, PREPARED], cwd=directory, env=env, check=True, stdout=subprocess.DEVNULL)
    found = []
    for mistake in MISTAKES:
        if mistake.extra:
            if not take_away:
                continue
            command = ["python", "-m", "pip", "uninstall", "--quiet", "--yes", *mistake.extra]
            subprocess.run(command, env=env, check=True, stderr=subprocess.DEVNULL)
        done = made(mistake, directory, env)
        wrong = problems(mistake, done)
        print(
            f"{'WRONG' if wrong else 'ok'}  [{done.status}] {done.seconds:5.1f} s  {mistake.what}", flush=True
        )
        if wrong:
            print(
                f"   $ {mistake.command}\n   {'; '.join(wrong)}\n{done.out[-500:]}{done.err[-1500:]}",
                flush=True,
            )
        found.append((mistake, done))
        if keep is not None:  # an hour's work shall not be lost with its last line
            write_page({"mistakes": rows_of(found, str(keep))})
    return found


def rows_of(mistakes: list[tuple[Mistake, Done]], hide: str) -> list[list[str]]:
    """Rows of the table of mistakes. hide: the temporary directory, which says nothing."""
    rows = []
    for mistake, done in mistakes:
        text = message(done).replace(hide, "...")
        shown = "<br>".join(f"`{cell(line)}`" for line in text.splitlines()[-3:])
        command = cell(mistake.command + (", then Ctrl-C" if mistake.interrupt_at else ""))
        rows.append([mistake.what, f"`{command}`", shown, str(done.status), f"{done.seconds:.0f}"])
    return rows


def write_page(found: dict[str, Any]) -> None:
    """Keep what was found beside what was found before, and write docs/newcomer.md of both."""
    earlier = sorted(RESULTS.glob("*-newcomer.json"))
    kept = json.loads(earlier[-1].read_text()) if earlier else {"times": {}, "pages": {}, "mistakes": []}
    today = datetime.date.today().isoformat()
    kept |= {"date": today, "command": "python -m tools.newcomer", **found}
    (RESULTS / f"{today}-newcomer.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page_of(kept))


def page_of(found: dict[str, Any]) -> str:
    """docs/newcomer.md."""
    rows = found["mistakes"]
    return "\n".join(
        [
            "# A stranger's first hour",
            "",
            f"Written by `make newcomer` on {found['date']}: the wheel in an empty environment. It follows",
            "the README and every tutorial word for word, compares what they print, and makes the mistakes",
            "below. It fails if a status, a message or an output is wrong.",
            "",
            *([str(found["note"]), ""] if found.get("note") else []),
            "| from nothing to | seconds |",
            "|---|---:|",
            *(f"| {what} | {seconds:.0f} |" for what, seconds in found["times"].items()),
            "",
            "| followed word for word | blocks |",
            "|---|---:|",
            *(f"| {page} | {count} |" for page, count in found["pages"].items()),
            "",
            f"{len(rows)} lines that a newcomer types, what each prints, and its exit status; lines such as",
            "`Try: dgemma generate --help` are left out.",
            "",
            "| what | command | prints | status | seconds |",
            "|---|---|---|---:|---:|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
        ]
    )


def cell(text: str) -> str:
    """As code within a cell of a table."""
    short = text if len(text) <= 300 else text[:297] + "..."
    return short.replace("`", "'").replace("|", "\\|").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--here", action="store_true", help="the mistakes alone, in this environment")
    parser.add_argument("--in", type=Path, metavar="VENV", dest="place", help="the mistakes alone, there")
    args = parser.parse_args()
    # A shell's background job ignores Ctrl-C, and so would the commands that it is typed to.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not is_taken(8000), "port 8000 is taken; the tutorials serve there"
    # An account without settings and caches; pip still finds its own configuration.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XDG_", "HF_", "DGEMMA_"))}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "home").mkdir()
        (root / "mistakes").mkdir()
        clean["HOME"] = str(root / "home")
        if args.here or args.place:
            programs = args.place.resolve() / "bin" if args.place else Path(sys.executable).parent
            clean["PATH"] = f"{programs}{os.pathsep}{clean['PATH']}"
            done = make_mistakes(
                root / "mistakes", clean, take_away=bool(args.place), keep=root if args.place else None
            )
            return int(any(problems(*one) for one in done))
        copy_of_the_tree(root / "tree")
        times, env = first_steps(root / "tree", root / "venv", clean)
        for what, seconds in times.items():
            print(f"{seconds:6.1f} s  {what}", flush=True)
        pages, wrong = follow_pages(root, env)
        write_page({"times": times, "pages": pages, "note": ""})
        done = make_mistakes(root / "mistakes", env, take_away=True, keep=root)
    too_late = {what: seconds for what, seconds in times.items() if seconds > LIMIT_S}
    print("\n".join([*wrong, *(f"{what} took {seconds:.0f} s" for what, seconds in too_late.items())]))
    return int(bool(wrong or too_late or any(problems(*one) for one in done)))


def follow_pages(root: Path, env: dict[str, str]) -> tuple[dict[str, int], list[str]]:
    """The README in the tree, then each tutorial in a directory of its own."""
    tree, counts, wrong = root / "tree", dict[str, int](), list[str]()
    for page in ("README.md", *(f"docs/tutorials/{name}.md" for name in _TUTORIALS)):
        if page == "README.md":
            directory = tree
        else:
            directory = root / Path(page).stem
            directory.mkdir()
        began = time.perf_counter()
        counts[page], found = Reader(directory, env).follow((tree / page).read_text())
        wrong += [f"{page}: {one}" for one in found]
        seconds = time.perf_counter() - began
        print("\n".join([f"{seconds:6.1f} s  {page}: {counts[page]} blocks", *found]), flush=True)
        if page == "README.md":  # the home page of the documentation installs these too
            wheel = next((tree / "dist").glob("*.whl"))
            subprocess.run(
                ["python", "-m", "pip", "install", "--quiet", f"{wheel}[server,train]"], env=env, check=True
            )
    return counts, wrong


if __name__ == "__main__":
    sys.exit(main())
