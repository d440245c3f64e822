"""Real processes that compute one model together: the same text as one, and one clear end if any is lost.

The file runs itself as the processes of `dgemma.load(mesh=...)`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

import dgemma
from dgemma.checkpoint.presets import PRESETS, layers
from dgemma.checkpoint.random_weights import write_random
from dgemma.cli.main import main
from dgemma.errors import RankError
from dgemma.scale.processes import joined
from rank_processes import run_processes, run_rank
from server.real_server import RealServer, serving, write_adapters
from sizes import cases

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or sys.platform == "win32", reason="torch has no gloo here"
)
CONFIG = replace(
    PRESETS["tiny"].config,
    num_heads=4,
    layers=layers(2, head_dim=16, kv_heads=4, full_head_dim=32, full_kv_heads=2),
    vocab_size=9000,
)
PROMPTS = ["The sea is", "A", "Once upon a time there was a small house"]
OPTIONS: dict[str, Any] = {"seed": 5, "max_tokens": 24, "max_denoising_steps": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("ranks") / "served"
    write_random(path, CONFIG, dtype="F32", seed=1)
    return path


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(checkpoint, tmp_path_factory.mktemp("adapters"))["poems"]


# As a library


def texts_of(lm: dgemma.LanguageModel) -> list[str]:
    """Several calls; without a seed, with pins, and left to right."""
    canvas = [answer.text for answer in lm.generate(PROMPTS, **OPTIONS)]
    causal = lm.generate(PROMPTS[0], decode="causal", **OPTIONS).text
    pinned = lm.generate(PROMPTS[0], pins={3: 700, 5: [8, 9]}, **OPTIONS).text
    return [*canvas, causal, pinned, lm.fingerprint()]


def rank(mesh: DeviceMesh, checkpoint: str, adapter: str) -> dict[str, Any]:
    lm = dgemma.load(checkpoint, dtype="float32", mesh=mesh)
    return {
        "texts": texts_of(lm),
        "adapted": texts_of(lm.with_adapter(adapter)),
        "drawn": lm.generate(PROMPTS[0], max_tokens=8, max_denoising_steps=1).text,  # each rank draws a seed
        "parameters": sum(weight.numel() for weight in lm.transformer.parameters()),
    }


@pytest.mark.parametrize("size", [2, 4][: cases(2, 1)])
def test_ranks_that_run_one_program_have_the_texts_of_one_process(
    checkpoint: Path, adapter: Path, tmp_path: Path, size: int
) -> None:
    first, *others = run_processes(__file__, size, tmp_path, checkpoint, adapter)
    assert all(other["drawn"] == first["drawn"] for other in others)
    lm = dgemma.load(checkpoint, dtype="float32")
    whole = {"texts": texts_of(lm), "adapted": texts_of(lm.with_adapter(adapter))}
    assert whole["texts"] != whole["adapted"]
    for found in (first, *others):
        assert {name: found[name] for name in whole} == whole
        assert found["parameters"] < sum(weight.numel() for weight in lm.transformer.parameters())


# As a command


def test_a_command_starts_the_other_ranks_and_ends_them(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(checkpoint), "Hello", "--seed", "3", "--max-tokens", "20", "--raw"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    found = subprocess.run(
        [sys.executable, "-m", "dgemma.cli.main", *command, "--tensor-parallel", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == alone
    end = time.monotonic() + 60
    while running_with(str(checkpoint)):
        assert time.monotonic() < end
        time.sleep(0.05)


def running_with(argument: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if argument in (p.info["cmdline"] or ())]


@pytest.mark.parametrize(
    ("size", "why"),
    [("3", "cannot be divided evenly"), ("0", "must be at least 1"), ("64", "Possible here: 1, 2")],
)
def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], size: str, why: str
) -> None:
    assert main(["generate", str(checkpoint), "Hello", "--tensor-parallel", size]) == 2
    assert why in capsys.readouterr().err


def test_another_number_of_processes_than_was_started_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["generate", str(checkpoint), "Hello", "--tensor-parallel", "2"]) == 2
    assert "tensor_parallel is 2, but 4 processes were started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "RANK"), ({"RANK": "0"}, "MASTER_ADDR"), ({"RANK": "0", "MASTER_ADDR": "::1"}, "MASTER_PORT")],
)
def test_processes_that_were_started_in_part_are_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], missing: str
) -> None:
    for name, value in {"WORLD_SIZE": "2", **given}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(dgemma.InputError, match=f"WORLD_SIZE is set, but {missing} is not"),
        joined(2, "cpu", [], option="nproc"),
    ):
        pass


def test_a_machine_with_too_few_gpus_or_with_apples_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(dgemma.InputError, match="nproc is 4; this machine has 2 GPUs"),
        joined(4, "cuda", [], option="nproc"),
    ):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for device in ("auto", "mps"):
        with (
            pytest.raises(dgemma.InputError, match=r"nproc is 2.*'mps'.*device cpu"),
            joined(2, device, [], option="nproc"),
        ):
            pass


def test_a_rank_that_cannot_start_ends_those_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = subprocess.Popen, []

    def start(command: list[str], **options: Any) -> Any:
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(real([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with (
        pytest.raises(RankError, match="rank 2 of 3 cannot be started: Resource temporarily"),
        joined(3, "cpu", [], option="nproc"),
    ):
        pass
    assert started[0].poll() is not None


def test_a_rank_cannot_save_what_it_has_a_part_of(checkpoint: Path, tmp_path: Path) -> None:
    lm = dgemma.load(checkpoint, dtype="float32")
    lm.transformer.ranks = type("Two", (), {"size": 2})()
    for act in (lm.save, lm.save_adapter):
        with pytest.raises(dgemma.InputError, match="mesh has 2 ranks"):
            act(tmp_path / "saved")


# As a server


def ask(server: RealServer, prompt: str, **body: Any) -> httpx2.Response:
    options = {"prompt": prompt, "max_tokens": 24, "seed": 5, "max_denoising_steps": 3, **body}
    return httpx2.post(f"{server.address}/v1/completions", json={"model": "served", **options}, timeout=300)


def test_a_server_of_two_ranks_answers_as_one_process(checkpoint: Path, adapter: Path) -> None:
    lm = dgemma.load(checkpoint, dtype="float32")
    models = (lm, lm.with_adapter(adapter))
    expected = [model.generate(prompt, **OPTIONS).text for model in models for prompt in PROMPTS]
    flags = ("--tensor-parallel", "2", "--adapter", f"poems={adapter}", "--dtype", "float32")
    with serving(str(checkpoint), *flags) as server, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, server, prompt) for prompt in PROMPTS]
        asked += [pool.submit(ask, server, prompt, model="poems") for prompt in PROMPTS]
        answers = [each.result().raise_for_status().json() for each in asked]
        assert [answer["choices"][0]["text"] for answer in answers] == expected
        refused = ask(server, "x", max_tokens=-1)
        assert refused.status_code == 400
        _, *helpers = ranks_of(server)
        server.process.terminate()
        assert server.process.wait(120) == 0
        assert not psutil.wait_procs(helpers, timeout=60)[1]


@pytest.mark.parametrize("moment", range(cases(20, 1)))
def test_a_rank_that_is_killed_ends_the_server_and_no_request_hangs(checkpoint: Path, moment: int) -> None:
    draw = random.Random(moment)
    with serving(str(checkpoint), "--tensor-parallel", "2", "--dtype", "float32") as server:
        assert ask(server, "warm").status_code == 200
        ranks = ranks_of(server)
        assert len(ranks) == 2
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(outcome, server, f"{number} is", 10_000) for number in range(4)]
            time.sleep(draw.uniform(0, 3))
            ranks[draw.randrange(2)].kill()
            began = time.monotonic()
            found = [each.result() for each in asked]
            seconds = time.monotonic() - began
        assert seconds < 60  # one that hangs would hang for half an hour
        assert set(found) <= {"answered", "failed"}
        assert not psutil.wait_procs(ranks[1:], timeout=60)[1]
        assert server.process.wait(60) != 0


def ranks_of(server: RealServer) -> list[psutil.Process]:
    first = psutil.Process(server.process.pid)
    return [first, *(child for child in first.children() if "serve" in child.cmdline())]


def outcome(server: RealServer, prompt: str, max_tokens: int) -> str:
    with suppress(httpx2.TransportError):
        response = ask(server, prompt, max_tokens=max_tokens, ignore_eos=True)
        return "answered" if response.status_code == 200 else "failed"
    return "failed"


if __name__ == "__main__":
    run_rank(rank)
