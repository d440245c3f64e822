"""Run the README word for word, as a new user would: in a copy of the tree and an empty environment.

    python tools/run_documented.py README.md

Blocks marked `sh` and `python` run in order in one directory; any failure ends the run. Then the example
programs run, and wheel size and the start of `dgemma --help` are printed. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```\n"
    r"(?:\n+```text\n(?P<prints>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
MAX_HELP_SECONDS = 0.5
TYPED = "Every morning Emma gave the dog some fresh water.\nWho had a dog?\n"  # what an example reads


@dataclass(frozen=True)
class Block:
    """A block to run. prints: the `text` block directly behind it."""

    language: str
    text: str
    prints: str | None


def blocks_of(page: str) -> Iterator[Block]:
    """The `sh` and `python` blocks of a page, without those that are marked as not run."""
    for found in BLOCK.finditer(page):
        if found["skip"] is None and found["language"] in ("sh", "python"):
            yield Block(found["language"], found["text"], found["prints"])


def empty_environment(directory: Path, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A new environment, and the variables of a shell in it: nothing of the calling one may help."""
    venv.create(directory, with_pip=True)
    env = {k: v for k, v in variables.items() if not k.startswith("PYTHON")}
    env["PATH"] = f"{directory / 'bin'}{os.pathsep}{env['PATH']}"
    return env


def copy_of_the_tree(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def children_s() -> float:
    """Processor seconds of all processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main(page: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tree, environment = Path(scratch) / "tree", Path(scratch) / "venv"
        copy_of_the_tree(tree)
        env = empty_environment(environment)

        def run(*command: str, typed: str = "") -> None:
            started = time.perf_counter()
            subprocess.run(command, cwd=tree, env=env, check=True, input=typed, text=True)
            print(f"({time.perf_counter() - started:.1f} s)", flush=True)

        blocks = list(blocks_of((tree / page).read_text()))
        assert blocks, f"{page} has no blocks to run"
        for block in blocks:
            print(f"--- {block.language}\n{block.text}", flush=True)
            shell = ("bash", "-euo", "pipefail", "-c")
            run(*(shell if block.language == "sh" else ("python", "-c")), block.text)
        wheel = next((tree / "dist").glob("*.whl"))
        # The agent's example serves, and the adapter's is asked by OpenAI's client.
        run("python", "-m", "pip", "install", "--quiet", f"{wheel}[server,train]", "openai==3.49.0")
        run("dgemma", "new", "--preset", "tiny", "my-model")
        for example in sorted((tree / "examples").glob("*.py")):
            print(f"--- {example.name}", flush=True)
            run("python", str(example), "my-model", typed=TYPED)
        print("--- batch.jsonl", flush=True)
        batch = ("bundled:text", "examples/batch.jsonl", "results.jsonl", "--served-model-name", "dgemma")
        run("dgemma", "run-batch", *batch)
        print(f"wheel: {wheel.stat().st_size / 1e3:.0f} kB")
        seconds = []
        for _ in range(7):  # of the processor: others may be busy beside it
            started = children_s()
            subprocess.run(["dgemma", "--help"], env=env, stdout=subprocess.DEVNULL, check=True)
            seconds.append(children_s() - started)
        print(f"dgemma --help: {min(seconds):.3f} to {max(seconds):.3f} s in {len(seconds)} runs")
        assert sorted(seconds)[len(seconds) // 2] < MAX_HELP_SECONDS


if __name__ == "__main__":
    main(*sys.argv[1:])
