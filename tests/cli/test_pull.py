"""`dgemma pull` as a user types it, against a real server on loopback."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgemma.cli import pull
from dgemma.errors import CheckpointError
from dgemma.machine import size_text
from fake_hub import NAME, NOT_READ, SHARDED, SHARDS, FakeHub, environment, running_hub, use_hub

TOTAL = sum(map(len, SHARDED.values()))
# The command alone, as cli/main.py runs it.
COMMAND = (
    "import argparse, sys; from dgemma.cli import pull; parser = argparse.ArgumentParser()\n"
    "pull.add_arguments(parser); sys.exit(pull.run(parser.parse_args()))"
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub() as fake:
        fake.repos[NAME] = {**SHARDED, **NOT_READ}
        use_hub(monkeypatch, fake.address, tmp_path / "home")
        yield fake


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    pull.add_arguments(parser)
    status = pull.run(parser.parse_args(argv))
    out, err = capsys.readouterr()
    return status, out, err


def test_it_prints_the_directory_and_says_the_size_first(
    server: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, NAME)
    assert status == 0
    assert {f.name for f in Path(out.rstrip("\n")).iterdir()} == set(SHARDED)
    assert err == f"{NAME}: 6 files, {size_text(TOTAL)}; {size_text(TOTAL)} to fetch\n"
    status, again, err = run(capsys, NAME, "--revision", "main")
    assert (status, again) == (0, out)
    assert err == f"{NAME}: 6 files, {size_text(TOTAL)}; nothing to fetch\n"


def test_json_is_for_a_program(server: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, NAME, "--json")
    found = json.loads(out)
    assert found.keys() == {"name", "path", "bytes", "files"}
    assert (found["name"], found["bytes"]) == (NAME, TOTAL)
    assert set(found["files"]) == set(SHARDED)
    assert Path(found["path"]).name == server.commit(NAME)


def test_progress_is_lines_in_a_pipe_and_reaches_the_end(
    server: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.cli.views.progress._SECONDS_BETWEEN_LINES", 0.0)
    server.repos[NAME][SHARDS[1]] = bytes(20_000_000)
    _, _, err = run(capsys, NAME)
    lines = [line for line in err.splitlines() if line.startswith("fetching: ")]
    assert lines[-1] == "fetching: 20.10 of 20.10 MB"


def test_progress_is_a_bar_on_a_terminal(
    server: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status, out, err = run(capsys, NAME)
    assert (status, out.count("\n")) == (0, 1)
    assert "fetching: " not in err


def test_offline_it_names_the_copy_in_the_cache(
    server: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, _ = run(capsys, NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, out, err = run(capsys, NAME)
    assert (status, out) == (0, path)
    whole = "the copy in the cache is whole, but HF_HUB_OFFLINE is set"
    assert err == f"{NAME}: 6 files, {size_text(TOTAL)}; {whole}\n"


def test_too_little_room_names_needed_and_free(
    server: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos[NAME][SHARDS[1]] = bytes(20_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=10_000_000))
    with pytest.raises(CheckpointError, match=r"needs 20.1 MB, .* has 10.0 MB free"):
        run(capsys, NAME)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{NAME}: 6 files, 20.1 MB; 20.1 MB to fetch\n"


def test_interrupting_keeps_whole_files_and_the_next_run_fetches_the_rest(
    server: FakeHub, tmp_path: Path
) -> None:
    server.stalls[SHARDS[1]] = threading.Event()
    command = [sys.executable, "-c", COMMAND, NAME]
    env = environment(server.address, tmp_path / "home")
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        until = time.monotonic() + 120
        while SHARDS[1] not in server.fetched() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (130, "")
    assert err.splitlines()[-1] == (
        "dgemma pull: interrupted; files that are whole stay, the same command fetches the rest"
    )
    server.stalls.pop(SHARDS[1]).set()
    server.requests.clear()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert server.fetched() == [SHARDS[1]]
    assert (Path(done.stdout.strip()) / SHARDS[1]).read_bytes() == SHARDED[SHARDS[1]]
