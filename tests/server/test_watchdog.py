"""A step that hangs is seen from outside and told to its client; a restart, or a signal, ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import httpx2

from dgemma.server.app import create_app
from dgemma.server.http.settings import Settings
from server.fake_engine import FakeText
from server.served import CHAT, HELLO, error_of, eventually, on_a_port
from server.toy_server import toy_engine

ROOT = Path(__file__).parents[2]
ASKED = {**HELLO, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}


def test_a_client_of_a_hung_step_gets_503_and_the_next_one_its_answer() -> None:
    engine = toy_engine(3.0, hangs=True)
    app = create_app(Settings(), engine, FakeText())
    with on_a_port(app) as address:
        response = httpx2.post(f"{address}{CHAT}", json=ASKED, timeout=60)
        assert (response.status_code, error_of(response)["code"]) == (503, "engine_restarted")
        assert int(response.headers["retry-after"]) > 0
        engine._step_timeout_s = 600.0  # a busy machine is no hung step
        again = httpx2.post(f"{address}{CHAT}", json=ASKED, timeout=60)
        assert again.status_code == 200
        assert httpx2.get(f"{address}/ready", timeout=60).status_code == 200
        page = httpx2.get(f"{address}/metrics", timeout=60).text
    assert "dgemma_engine_restarts_total 1.0" in page
    assert "dgemma_engine_stalled 0.0" in page


def test_while_an_engine_is_stalled_health_and_readiness_say_so() -> None:
    engine = toy_engine(600)
    app = create_app(Settings(), engine, FakeText())
    with on_a_port(app) as address:
        engine._is_stalled = True
        for path in ("/health", "/ready"):
            response = httpx2.get(f"{address}{path}", timeout=60)
            assert (response.status_code, error_of(response)["code"]) == (503, "engine_stalled")
        engine._is_stalled = False
        assert httpx2.get(f"{address}/health", timeout=60).status_code == 200


def test_a_server_whose_engine_has_stopped_for_good_ends_for_its_supervisor() -> None:
    engine = toy_engine(600)
    app = create_app(Settings(), engine, FakeText())
    with on_a_port(app) as address:
        engine._failure = "OSError: the device is gone"
        eventually(lambda: not _listens(address))


def _listens(address: str) -> bool:
    try:
        httpx2.get(f"{address}/health", timeout=60)
    except httpx2.HTTPError:
        return False
    return True


def test_a_signal_ends_the_process_although_a_step_hangs(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "server.toy_server"], env=env, stderr=stderr)
    try:
        eventually(lambda: '"listening"' in log.read_text())
        (line,) = [line for line in log.read_text().splitlines() if '"listening"' in line]
        address = f"http://127.0.0.1:{json.loads(line)['port']}"
        threading.Thread(target=_ask, args=(address,), daemon=True).start()
        eventually(lambda: "dgemma_slots_in_use 1.0" in httpx2.get(f"{address}/metrics", timeout=60).text)
        process.send_signal(signal.SIGTERM)
        process.wait(120)  # of a step that never ends
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def _ask(address: str) -> None:
    with suppress(httpx2.HTTPError):
        httpx2.post(f"{address}{CHAT}", json=ASKED, timeout=60)
