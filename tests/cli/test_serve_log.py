"""The log of `dgemma serve` as a user sees it: lines on a terminal, JSON in a pipe, or what the flag says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from sizes import cases
from terminal import Program, PseudoTerminal, Terminal

ROOT = Path(__file__).parents[2]
CODE = "import runpy; runpy.run_module('cli.fake_model', run_name='__main__')"
SERVE = ("serve", "models/tiny", "--port", "0")
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "seed": 7}


def shown(screen: Terminal) -> str:
    return "\n".join(screen.text())


def served_at(terminal: PseudoTerminal) -> str:
    screen = terminal.wait_for(lambda screen: re.search(r"http://127\.0\.0\.1:\d+\W", shown(screen)))
    found = re.search(r"http://127\.0\.0\.1:\d+", shown(screen))
    assert found is not None
    return found[0]


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}][: cases(2, 1)])
def test_a_terminal_shows_readable_lines_until_ctrl_c(environment: dict[str, str]) -> None:
    with (
        PseudoTerminal(120, 24) as terminal,
        Program(terminal, CODE, *SERVE, env=environment) as program,
    ):
        address = served_at(terminal)
        assert httpx2.post(f"{address}/v1/chat/completions", json=HELLO, timeout=60).status_code == 200
        terminal.wait_for(lambda screen: "tokens" in shown(screen))
        assert httpx2.get(f"{address}/a%0a%1b%5b2Jb", timeout=60).status_code == 404
        terminal.wait_for(lambda screen: "not_found" in shown(screen))
        program.interrupt()
        assert program.wait() == 0
        lines = [line for line in terminal.screen.text() if line.strip()]
        raw = terminal.raw
    serving, answered, missing, *ending = (line.rstrip() for line in lines)
    clock = r"\d\d:\d\d:\d\d  "
    where = re.escape(f"serving tiny at {address}  (docs: /docs, Ctrl-C ends)")
    assert re.fullmatch(clock + where, serving)
    assert re.fullmatch(clock + r"POST /v1/chat/completions  200  \d+\.\d\d s  \d+ tokens", answered)
    assert re.fullmatch(clock + r"GET /a%0A%1B%5B2Jb  404  \d+\.\d\d s  not_found", missing)
    assert any("draining" in line for line in ending)
    assert any("drained" in line for line in ending)
    assert b"{" not in raw
    assert (b"\x1b[33mGET" in raw) == (not environment)
    assert (re.search(rb"\x1b\[[0-9;]+m", raw) is not None) == (not environment)


def test_json_can_be_asked_for_on_a_terminal() -> None:
    with (
        PseudoTerminal(300, 24) as terminal,
        Program(terminal, CODE, *SERVE, "--log-format", "json") as program,
    ):
        terminal.wait_for(lambda screen: '"listening"' in shown(screen))
        program.interrupt()
        assert program.wait() == 0
        text = shown(terminal.screen)
    events = [json.loads(line.strip()) for line in text.splitlines() if line.startswith("{")]
    (listening,) = [entry for entry in events if entry["event"] == "listening"]
    assert listening["address"] == f"http://127.0.0.1:{listening['port']}"
    assert "drained" in [entry["event"] for entry in events]


@pytest.mark.parametrize("log_format", ["text", "auto"][: cases(2, 1)])
def test_a_pipe_gets_json_unless_text_is_asked_for(log_format: str) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.fake_model", *SERVE],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "DGEMMA_LOG_FORMAT": log_format, "TERM": "xterm"},
    )
    try:
        assert process.stderr is not None
        first = next(line for line in process.stderr if '"listening"' in line or "  serving " in line)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()
    if log_format == "auto":
        assert {"draining", "drained"} <= {json.loads(line)["event"] for line in rest.splitlines()}
        assert first.startswith("{")
    else:
        assert re.search(r"^\d\d:\d\d:\d\d  serving tiny at http://127\.0\.0\.1:\d+  \(", first)
        assert re.search(r"^\d\d:\d\d:\d\d  drained$", rest, re.MULTILINE)
        assert "\x1b" not in first + rest
