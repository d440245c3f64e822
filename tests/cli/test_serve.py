"""`dgemma serve` as a user types it: checked before anything is loaded, a log of JSON lines, a clean end."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cli.fake_model import FakeModel
from dgemma.checkpoint.presets import PRESETS
from dgemma.cli import serve
from dgemma.cli.main import main
from dgemma.cli.server_options import (
    BATCH_FLAGS,
    LOAD_FLAGS,
    SERVER_FLAGS,
    Flag,
    add_flags,
    read_flags,
    served_name,
)
from dgemma.cli.views import progress
from dgemma.errors import InputError
from dgemma.server import run as server_run
from dgemma.server.http.log import LOGGER
from dgemma.server.http.settings import Adapter, LoadOptions, Settings
from server.served import error_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    fake.install(monkeypatch.setitem)
    for flag in (*SERVER_FLAGS, *LOAD_FLAGS):
        monkeypatch.delenv(flag.variable, raising=False)
    # What `serve` does to the log of this process is undone.
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(LOGGER, name, getattr(LOGGER, name))
    return fake


@pytest.fixture
def served(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings with which it came to serving, which ends at once."""
    found: list[Settings] = []

    def run(server: Any, sockets: list[socket.socket]) -> None:
        assert sockets[0].getsockname()[1] > 0
        found.append(server._state.settings)

    monkeypatch.setattr(server_run.DrainingServer, "run", run)
    return found


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    try:
        status = main(["serve", *argv])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert out == ""
    return status, err


def test_flags_and_variables_reach_the_model_the_engine_and_the_server(
    model: FakeModel,
    served: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("dgemma.cli.serve.check_fit", lambda model, settings: None)
    monkeypatch.setenv("DGEMMA_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("DGEMMA_ADAPTER", f"sums={tmp_path}/a,poems={tmp_path}/b")
    monkeypatch.setenv("DGEMMA_EXACT", "1")
    monkeypatch.setenv("DGEMMA_COMPILE", "1")
    monkeypatch.setenv("DGEMMA_API_KEY", "k")
    flags = "--port 0 --max-num-seqs 3 --prefill-chunk 64 --canvas-length 8 --queue-len 9 --dtype float32"
    more = "--memory-fraction 0.5 --no-prefix-reuse --no-compile --device cuda:1 --drain-timeout 7"
    status, err = said(capsys, "some/tiny", *flags.split(), *more.split())
    assert (status, err) == (0, "")
    assert model.loads == [
        {"model": "some/tiny", "dtype": "float32", "device": "cuda:1", "exact": True, "compile": False}
    ]
    assert model.opened == [
        {
            "adapters": {"sums": tmp_path / "a", "poems": tmp_path / "b"},
            "max_num_seqs": 3,
            "chunk_size": 64,
            "max_model_len": 512,
            "memory_fraction": 0.5,
            "canvas_len": 8,
            "queue_len": 9,
            "max_tenant_waiting": 4,
            "step_timeout_s": 120.0,
            "reuse_prefixes": False,
        }
    ]
    (settings,) = served
    assert settings.served_model_name == "tiny"
    assert (settings.api_keys, settings.drain_timeout_s) == (("k",), 7.0)


@pytest.mark.parametrize("flags", ["--replicas 2", "--max-replicas 2", "--replicas 1 --max-replicas 2"])
def test_more_than_one_replica_is_for_ray(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    monkeypatch.setitem(sys.modules, "dgemma.ray", None)  # as if it could not be imported
    status, err = said(capsys, "tiny", "--port", "0", *flags.split())
    assert (status, model.loads) == (2, [])
    assert "pip install 'dgemma[ray]'" in err
    status, err = said(capsys, "tiny", "--port", "0", "--tensor-parallel", "2", *flags.split())
    assert status == 2
    assert "tensor_parallel is 2 with 2 replicas" in err


def test_without_flags_the_defaults_are_those_of_the_documentation(
    model: FakeModel, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "tiny", "--port", "0") == (0, "")
    assert served == [Settings(port=0, served_model_name="tiny")]
    assert model.loads == [
        {"model": "tiny", "dtype": "auto", "device": "auto", "exact": False, "compile": False}
    ]
    assert model.opened[0]["reuse_prefixes"] is True


@pytest.mark.parametrize(
    ("model_argument", "name"),
    [
        ("runs/tiny", "tiny"),
        ("runs/tiny/", "tiny"),
        ("google/diffusiongemma-26B-A4B-it", "diffusiongemma-26B-A4B-it"),
        ("bundled:sudoku", "bundled:sudoku"),
        (".", "dgemma"),
        ("..", "dgemma"),
        ("/", "dgemma"),
        ("my models/first try", "dgemma"),
        ("Modèle", "dgemma"),
    ],
)
def test_a_model_is_served_under_its_last_part_where_that_is_a_name(model_argument: str, name: str) -> None:
    assert served_name(model_argument) == name
    Settings(served_model_name=name)


@pytest.mark.parametrize(
    ("argv", "variables", "message"),
    [
        (["--port", "70000"], {}, "--port: port is 70000; it must be a whole number from 0 to 65535."),
        ([], {"DGEMMA_MAX_MODEL_LEN": "long"}, "DGEMMA_MAX_MODEL_LEN is 'long'; it must be a whole number."),
        ([], {"DGEMMA_DTYPE": "flaot32"}, "DGEMMA_DTYPE is 'flaot32', not one of auto, float32, bfloat16"),
        ([], {"DGEMMA_EXACT": "2"}, "DGEMMA_EXACT is '2'; give 1 or 0."),
        (["--adapter", "sums"], {}, "--adapter: adapter is 'sums'; give it as name=path."),
        ([], {"DGEMMA_ADAPTER": "tiny=x"}, "DGEMMA_ADAPTER: the served name 'tiny' stands for two models"),
        (["--adapter", "sums={tmp}/none"], {}, "{tmp}/none has no adapter_config.json; give the directory"),
        (
            ["--max-model-len", "10"],
            {},
            "a context of 10 tokens has no space for a prompt and a canvas of 32. ",
        ),
        (
            ["--canvas-length", "8192"],
            {},
            "a context of 8192 tokens has no space for a prompt and a canvas of",
        ),
        ([], {"DGEMMA_MAX_MODEL_LEN": "9000"}, "--max-model-len is 9000; this model's context ends at 8192"),
        (
            ["--prefill-chunk", "1"],
            {},
            "--prefill-chunk: prefill_chunk is 1; it must be a whole number from 64 to",
        ),
        (["--host", "256.0.0.1"], {}, "cannot listen on 256.0.0.1 port 0: "),
        (
            ["--host", "1.2.3.4"],
            {},
            "cannot listen on 1.2.3.4 port 0: Cannot assign requested address. Choose",
        ),
        (["--port", "{taken}"], {}, "cannot listen on 127.0.0.1 port {taken}: Address already in use"),
    ],
)
def test_what_can_be_refused_is_one_line_before_the_model_is_loaded(
    argv: list[str],
    variables: dict[str, str],
    message: str,
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(PRESETS["tiny"].config.to_json()))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        facts = {"tmp": str(tmp_path), "taken": taken.getsockname()[1]}
        words = [word.format(**facts) for word in ("{tmp}/tiny", "--port", "0", *argv)]
        status, err = said(capsys, *words)
    assert status == (1 if "adapter_config" in message else 2)
    assert err.startswith(f"dgemma serve: {message.format(**facts)}")
    assert err.count("\n") == 1
    assert model.loads == []


def test_a_wrong_choice_gets_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    status, err = said(capsys, "tiny", "--dtype", "flaot32")
    assert status == 2
    assert "did you mean 'float32'?" in err


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_without_its_packages_it_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    expected = "dgemma serve: the server needs FastAPI and uvicorn; run: pip install 'dgemma[server]'\n"
    assert said(capsys, "bundled:text") == (2, expected)


def test_loading_is_told_in_the_form_of_the_log(
    model: FakeModel,
    served: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    model.progress = [(10**9, 2 * 10**9), (2 * 10**9, 2 * 10**9)]
    status, err = said(capsys, "tiny", "--port", "0")
    assert status == 0
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert events == ["loading: 1.00 of 2.00 GB", "loading: 2.00 of 2.00 GB"]


def test_importing_the_commands_imports_neither_torch_nor_the_server() -> None:
    code = (
        "import sys, dgemma.cli.main\n"
        "sys.exit(str({'torch', 'numpy', 'fastapi', 'starlette', 'pydantic', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_a_hangup_replaces_the_replicas_and_a_failure_of_it_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, is_called = signal.getsignal(signal.SIGHUP), threading.Event()
    told: list[str] = []
    monkeypatch.setattr(LOGGER, "info", told.append)
    monkeypatch.setattr(LOGGER, "exception", told.append)

    def fails() -> None:
        is_called.set()
        raise RuntimeError("Ray's own")

    try:
        serve._replace_on_hangup(fails)
        os.kill(os.getpid(), signal.SIGHUP)
        assert is_called.wait(60)
        deadline = time.monotonic() + 60
        while len(told) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told == ["replacing all replicas", "the replicas were not replaced"]


def flag_rows(page: str, heading: str) -> Iterator[tuple[str, str, str]]:
    """The first three columns of a section's table of flags."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    yield from re.findall(r"^\| `(--[^|]+)` \| (\w+) \| ([^|]+) \|", section, re.MULTILINE)


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_help_has_each_flag_with_its_default_and_variable_and_so_has_the_documentation(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = re.sub(r"\n {4,}", " ", capsys.readouterr().out)  # a long flag has its help below it
    shown = dict(re.findall(r"^  --([a-z-]+).*\((default: [^)]+\) \[\w+\])$", text, re.MULTILINE))
    flags: tuple[Flag, ...] = (*(SERVER_FLAGS if command == "serve" else BATCH_FLAGS), *LOAD_FLAGS)
    flags = tuple(flag for flag in flags if not flag.is_secret)
    assert [f"--{name}" for name in shown] == [flag.name for flag in flags]
    rows = {
        row[0].split("`")[0]: row for row in flag_rows((ROOT / "docs" / "server.md").read_text(), "Flags")
    }
    assert rows.keys() == {flag.name for flag in (*SERVER_FLAGS, *LOAD_FLAGS)}
    for flag in flags:
        name, variable, default = rows[flag.name]
        assert variable == flag.variable == "DGEMMA_" + flag.name[2:].replace("-", "_").upper()
        if (command, name) != ("run-batch", "--request-timeout"):  # which has a default of its own
            assert shown[flag.name[2:]] == f"default: {default}) [{variable}]"


def test_every_load_option_has_a_flag() -> None:
    assert [flag.field for flag in LOAD_FLAGS] == [entry.name for entry in fields(LoadOptions)]
    parser = argparse.ArgumentParser()
    add_flags(parser, LoadOptions, LOAD_FLAGS)
    given = {"DGEMMA_PREFIX_REUSE": "off", "DGEMMA_DEVICE": "mps", "DGEMMA_DTYPE": ""}
    read = read_flags(LoadOptions, LOAD_FLAGS, parser.parse_args(["--exact"]), given)
    assert read == LoadOptions(exact=True, reuse_prefixes=False, device="mps")
    with pytest.raises(InputError, match=r"DGEMMA_PREFIX_REUSE is 'of'; give 1 or 0."):
        read_flags(LoadOptions, LOAD_FLAGS, parser.parse_args([]), {"DGEMMA_PREFIX_REUSE": "of"})


def test_an_adapter_may_have_the_default_name_if_the_model_has_another() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings, SERVER_FLAGS)
    args = parser.parse_args(["--adapter", "dgemma=x"])
    read = read_flags(Settings, SERVER_FLAGS, args, {}, served_model_name="tiny")
    assert read.adapters == (Adapter(name="dgemma", path=Path("x")),)


def test_a_served_process_answers_finishes_after_sigterm_and_ends_with_status_zero() -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.fake_model", "serve", "models/tiny", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "DGEMMA_API_KEY": "k1,k2", "FAKE_SECONDS": "0.3"},
    )
    try:
        assert process.stderr is not None
        listening = next(entry for entry in map(json.loads, process.stderr) if entry["event"] == "listening")
        address = f"http://127.0.0.1:{listening['port']}"
        with httpx2.Client(timeout=120, headers={"authorization": "Bearer k2"}) as client:
            models = client.get(f"{address}/v1/models").json()
            assert [entry["id"] for entry in models["data"]] == ["tiny"]
            body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
            stream = {**body, "seed": 7, "stream": True}
            with client.stream("POST", f"{address}/v1/chat/completions", json=stream) as response:
                lines = response.iter_lines()
                assert "assistant" in next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(120) == 0
        events = [json.loads(line) for line in process.stderr]
        assert {"draining", "drained"} <= {entry["event"] for entry in events}
    finally:
        process.kill()
        process.communicate()


def test_keys_of_the_environment_are_asked_for(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[httpx2.Response] = []

    def run(server: Any, sockets: list[socket.socket]) -> None:
        import asyncio

        async def asked() -> None:
            transport = httpx2.ASGITransport(server.config.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                found.append(await client.get("/v1/models"))
                found.append(await client.get("/v1/models", headers={"authorization": "Bearer secret"}))

        asyncio.run(asked())

    monkeypatch.setattr(server_run.DrainingServer, "run", run)
    monkeypatch.setenv("DGEMMA_API_KEY", "secret")
    assert said(capsys, "tiny", "--port", "0")[0] == 0
    assert found[0].status_code == 401
    assert error_of(found[0])["code"] == "invalid_api_key"
    assert found[1].status_code == 200


def test_files_that_cannot_be_used_are_refused_before_the_model_is_loaded(
    model: FakeModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for flags, message in (
        (["--api-key-file", str(tmp_path / "none")], "the API key file .* cannot be read: No such file"),
        (["--tls-cert", str(tmp_path / "none")], "the certificate .*none cannot be used: No such file"),
        (["--tls-cert", str(broken)], "the certificate .*broken.pem cannot be used: "),
    ):
        status, err = said(capsys, "tiny", "--port", "0", *flags)
        assert status == 2
        assert re.search(message, err)
        assert err.count("\n") == 1
    assert model.loads == []
