"""A headless Neovim with the plugin of `editors/nvim`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parents[2] / "editors" / "nvim"
NVIM = os.environ.get("NVIM") or shutil.which("nvim")


@dataclass(frozen=True, kw_only=True)
class Found:
    works: bool  # no command raised an error
    reason: str
    returned_at_once: bool  # a request was still running when the commands had returned
    ended: bool
    lines: list[str]
    cursor: list[int]
    said: list[str]
    undone: list[str]  # the lines after one undo


def drive(directory: Path, *commands: str, lines: list[str], path: str | None = None, **given: Any) -> Found:
    """Run commands one after another without waiting, then wait for their answers."""
    assert NVIM is not None
    out = directory / "found.json"
    driven = {"commands": commands, "lines": lines, "out": str(out), **given}
    own = {"DGEMMA_TEST": json.dumps(driven), "HOME": str(directory), "XDG_CONFIG_HOME": str(directory)}
    driver = Path(__file__).with_name("drive.lua")
    done = subprocess.run(
        [NVIM, "--headless", "-u", "NONE", "-i", "NONE", "-n", "--cmd", f"set rtp^={PLUGIN}",
         "-c", "runtime plugin/dgemma.lua", "-c", f"luafile {driver}"],
        env={**os.environ, **own, **({} if path is None else {"PATH": path})},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert out.exists(), done.stderr
    return Found(**json.loads(out.read_text()))
