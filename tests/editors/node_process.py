"""The tests of the VS Code extension, which are in JavaScript: Node runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

EXTENSION = Path(__file__).parents[2] / "editors" / "vscode"
LEAST = 20  # AbortSignal.any, which VS Code's Node has


def _node() -> str | None:
    found = os.environ.get("NODE") or shutil.which("node")
    if found is None:
        return None
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    return found if int(told.removeprefix("v").partition(".")[0]) >= LEAST else None


NODE = _node()
NO_NODE = f"there is no node {LEAST} or later; set NODE to one"


def run_tests(*files: Path, **env: str) -> int:
    """-> the number of tests, all of which passed."""
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", "--test-timeout=200000", *map(str, files)],
        env={**os.environ, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(re.findall(r"^# (\w+) (\d+)$", done.stdout, re.MULTILINE))
    assert counts["pass"] == counts["tests"], done.stdout
    return int(counts["tests"])
