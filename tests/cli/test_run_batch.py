"""`dgemma run-batch` as a user types it: refused before anything is loaded, cut off, resumed, its status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli.fake_model import FakeModel
from dgemma.cli.main import main
from dgemma.cli.server_options import LOAD_FLAGS, SERVER_FLAGS
from dgemma.cli.views import progress
from dgemma.server.batch.protocol import BatchRequests
from server.fake_engine import Script

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    fake.install(monkeypatch.setitem)
    for flag in (*SERVER_FLAGS, *LOAD_FLAGS):
        monkeypatch.delenv(flag.variable, raising=False)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e9)  # no line more on a slow machine
    return fake


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Six requests, the last of which is refused; and where results go."""
    lines = [request(seed) for seed in range(5)] + [request(5, temprature=1)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")


def request(seed: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"Say {seed}."}], "seed": seed, **more}
    return {"custom_id": f"say {seed}", "method": "POST", "url": CHAT, "body": body}


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(["run-batch", *argv])
    out, err = capsys.readouterr()
    assert out == ""
    return status, err


def statuses(out: str) -> dict[str, int]:
    lines = [json.loads(line) for line in Path(out).read_text().splitlines()]
    found = {line["custom_id"]: line["response"]["status_code"] for line in lines}
    assert len(found) == len(lines), "each custom_id once"
    return found


def test_the_status_is_one_if_a_request_failed_now_or_before_and_stderr_says_which(
    model: FakeModel, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = f"dgemma run-batch: 1 of 6 requests failed; {files[1]} has the reasons\n"
    status, err = said(capsys, "models/tiny", *files)
    assert status == 1
    assert err.startswith("request 'say 5' failed with 400: unknown field 'temprature'; did you mean")
    assert err.endswith("\n" + failed)
    assert err.count("\n") == 2
    assert statuses(files[1]) == {**{f"say {seed}": 200 for seed in range(5)}, "say 5": 400}
    assert said(capsys, "models/tiny", *files) == (1, failed)
    assert len(model.loads) == 1, "where all is answered nothing is loaded"


def test_the_status_is_zero_if_all_went_well(
    model: FakeModel, files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(request(1)))
    assert said(capsys, "tiny", *files) == (0, "")
    (line,) = map(json.loads, Path(files[1]).read_text().splitlines())
    assert line["response"]["body"]["choices"][0]["message"]["content"].startswith("Seed 1 ")


def test_flags_reach_the_model_and_the_engine_whose_queue_takes_all(
    model: FakeModel,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dgemma.cli.run_batch.check_fit", lambda model, settings: None)
    monkeypatch.setenv("DGEMMA_SERVED_MODEL_NAME", "tiny")
    flags = "--max-num-seqs 3 --max-choices 4 --exact --max-model-len 300"
    said(capsys, "models/other", *files, *flags.split())
    assert model.loads[0]["exact"]
    options = model.opened[0]
    assert (options["max_num_seqs"], options["queue_len"], options["max_model_len"]) == (3, 24, 300)
    assert 200 in statuses(files[1]).values()
    deadlines = {request.params.deadline_s for request in model.engine.requests}
    assert deadlines == {86400.0}, "nobody's answer is cut short because others wait too"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{in}", "{out}", "--max-num-seqs", "0"], "--max-num-seqs: max_num_seqs is 0; it must be"),
        (["{dir}/none", "{out}"], "{dir}/none cannot be read: No such file or directory."),
        (["-", "{out}"], "- cannot be read: No such file or directory."),
        (["{dir}/bad", "{out}"], "{dir}/bad, line 2: custom_id 'say 1' was given before; rename it."),
        (["{in}", "{dir}/none/out"], "{dir}/none/out cannot be written: No such file or directory."),
        (["{in}", "{in}"], "{in}, line 1 is not a result of run-batch; choose another file."),
        (["{in}", "{out}", "--adapter", "sums={dir}"], "{dir}/tiny does not exist"),
    ],
)
def test_what_can_be_refused_is_one_line_before_the_model_is_loaded(
    argv: list[str],
    message: str,
    model: FakeModel,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "bad").write_text((json.dumps(request(1)) + "\n") * 2)
    facts = {"in": files[0], "out": files[1], "dir": str(tmp_path)}
    status, err = said(capsys, f"{tmp_path}/tiny", *(word.format(**facts) for word in argv))
    assert status == (1 if "does not exist" in message else 2)
    assert err.startswith(f"dgemma run-batch: {message.format(**facts)}")
    assert err.count("\n") == 1
    assert model.loads == []


def test_of_many_failures_the_first_are_told(
    model: FakeModel, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model.script = lambda request: Script(text="x", fails_at=0)
    Path(files[0]).write_text("\n".join(json.dumps(request(seed)) for seed in range(9)))
    status, err = said(capsys, "tiny", *files)
    assert status == 1
    lines = err.splitlines()
    reason = " failed with 500: EngineFailureError: a step failed on secret words"
    assert len({line.removesuffix(reason) for line in lines[:5]}) == 5
    assert all(line.startswith("request 'say ") and line.endswith(reason) for line in lines[:5])
    assert lines[5] == "more requests failed; the results have all reasons"
    assert lines[6].startswith("dgemma run-batch: 9 of 9 requests failed")


def test_progress_is_plain_lines_in_a_pipe_and_counts_what_was_there_before(
    model: FakeModel,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path(files[0]).write_text("\n".join(json.dumps(request(seed)) for seed in range(3)))
    said(capsys, "tiny", *files)
    first, *_ = Path(files[1]).read_text().splitlines(keepends=True)
    Path(files[1]).write_text(first)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    status, err = said(capsys, "tiny", *files)
    assert status == 0
    assert err.splitlines() == [
        f"going on from {files[1]}, which has 1 results",
        "run-batch: 2 of 3 requests",
        "run-batch: 3 of 3 requests",
    ]


def test_on_a_terminal_progress_is_a_bar_and_a_name_is_shown_not_obeyed(
    model: FakeModel,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [request(1), {**request(2, temprature=1), "custom_id": "red \x1b[31m [bold]"}]
    Path(files[0]).write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, err = said(capsys, "tiny", *files)
    assert status == 1
    assert "request 'red \\x1b[31m [bold]' failed with 400" in err
    assert "━" in err
    assert "\nrun-batch: " not in err


def test_an_interrupt_while_loading_says_that_the_command_goes_on(
    model: FakeModel,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "load", interrupted)
    model.install(monkeypatch.setitem)
    message = "dgemma run-batch: interrupted after 0 of 6 requests; the same command goes on\n"
    assert said(capsys, "tiny", *files) == (130, message)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_process_that_is_ended_goes_on_with_the_same_command(
    number: int,
    status: int,
    model: FakeModel,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    command = [sys.executable, "-m", "cli.fake_model", "run-batch", "tiny", *files, "--max-num-seqs", "2"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "FAKE_HOLDS_FROM": "2"},
    )
    try:
        out = Path(files[1])
        end = time.monotonic() + 120
        while not out.exists() or out.read_bytes().count(b"\n") < 3:  # two answers and a refusal
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        # While it runs, no other process writes there.
        refused, err = said(capsys, "tiny", *files)
        assert (refused, model.loads) == (2, [])
        assert "is being written by another process" in err
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == status
    if number == signal.SIGINT:
        assert err.splitlines()[-1] == (
            "dgemma run-batch: interrupted after 3 of 6 requests; the same command goes on"
        )
    before = out.read_bytes()
    out.write_bytes(before + b'{"id": "batch_req_12')  # as if it had been writing
    status, err = said(capsys, "tiny", *files)
    assert status == 1
    assert err.startswith(f"going on from {out}, which has 3 results\n")
    assert out.read_bytes().startswith(before)
    assert statuses(files[1]).keys() == BatchRequests(Path(files[0]), max_line_bytes=9999).ids
    assert sorted(request.seed for request in model.engine.requests) == [2, 3, 4]
