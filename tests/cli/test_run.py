"""`dgemma run`: the largest weights that fit are chosen, fetched, quantized if need be, and answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dgemma.checkpoint.bundled import bundled_path
from dgemma.checkpoint.hub import PullPlan
from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.source import open_checkpoint
from dgemma.cli import run as run_command
from dgemma.cli.main import main
from dgemma.cli.run import choose, prepare
from dgemma.errors import InputError
from dgemma.machine import size_text
from fake_hub import FakeHub, running_hub, use_hub
from gguf_files import write_model

BIG = PRESETS["26b"].config
SIZES = count_parameters(BIG).bytes
EXTRA = 2_000_000_000


def published(name: str, size: int) -> PullPlan:
    return PullPlan(name=name, revision="main", commit="c", files={"w": size}, missing=frozenset(("w",)))


def chosen(available: int, wanted: str = "auto", plans: tuple[PullPlan, ...] = (), **more: Any) -> Any:
    found = choose("owner/big", BIG, wanted, available, is_quantized=False, published=lambda: plans, **more)
    return found.name, found.format


def test_the_largest_form_that_fits_is_chosen() -> None:
    assert chosen(SIZES["bf16"] + EXTRA) == ("owner/big", None)
    assert chosen(SIZES["bf16"] + EXTRA - 1) == ("owner/big", "int8")
    assert chosen(SIZES["int8"] + EXTRA - 1) == ("owner/big", "int4")
    with pytest.raises(InputError, match=r"owner/big needs .* GB of memory in its smallest form"):
        chosen(SIZES["4bit"] + EXTRA - 1)


def test_published_quantized_weights_go_before_quantizing_here() -> None:
    plans = (published("some/int4", 16_000_000_000), published("some/nvfp4", 18_000_000_000))
    assert chosen(40_000_000_000, plans=plans) == ("some/nvfp4", None)
    assert chosen(19_000_000_000, plans=plans) == ("some/int4", None)
    assert chosen(SIZES["bf16"] + EXTRA, plans=plans) == ("owner/big", None)


def test_what_was_asked_for_is_taken() -> None:
    assert chosen(10, "plain") == ("owner/big", None)
    assert chosen(1 << 50, "int4") == ("owner/big", "int4")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with running_hub() as fake:
        files = bundled_path("text").iterdir()
        fake.repos["someone/text"] = {file.name: file.read_bytes() for file in files}
        use_hub(monkeypatch, fake.address, tmp_path / "home")
        yield fake


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["run", *argv])
    out, err = capsys.readouterr()
    return status, out, err


ASK = ("A page", "--raw", "--seed", "1", "--max-tokens", "8", "--max-denoising-steps", "2", "--json")


def test_from_a_hub_name_to_an_answer(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "someone/text", *ASK)
    assert status == 0
    assert json.loads(out)["text"]
    assert "someone/text: 5.3 MB in memory, which fits into" in err
    assert re.search(r"to fetch: 5\.\d MB", err)
    assert "a step on a canvas of" in err
    # The second time nothing is fetched, and the text is the same.
    hub.requests.clear()
    again, text, err = run(capsys, "someone/text", *ASK)
    assert (again, json.loads(text)["text"]) == (0, json.loads(out)["text"])
    assert "to fetch" not in err
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def test_what_does_not_fit_is_quantized_once(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_command, "_EXTRA_BYTES", 0)
    sizes = count_parameters(open_checkpoint(bundled_path("text")).config).bytes
    monkeypatch.setattr(run_command, "free_bytes", lambda device: sizes["bf16"] - 1)
    status, out, err = run(capsys, "someone/text", *ASK)
    assert status == 0
    assert json.loads(out)["text"]
    assert "quantized to int8 here: bfloat16" in err
    (made,) = (tmp_path / "cache" / "dgemma" / "models").iterdir()
    assert open_checkpoint(made).quantized
    written = (made / "config.json").stat().st_mtime_ns
    assert json.loads(run(capsys, "someone/text", *ASK)[1])["text"] == json.loads(out)["text"]
    assert (made / "config.json").stat().st_mtime_ns == written


def test_a_gguf_file_is_taken_as_it_is_with_its_own_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "m.gguf", "Q8_0")
    assert prepare(str(tmp_path / "m.gguf"), "auto", "cpu") == tmp_path / "m.gguf"
    size = (tmp_path / "m.gguf").stat().st_size
    assert f"m.gguf: {size_text(size)} in memory, as it is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("x", "--regex", "("), "--regex: "),
        (("x", "--temperature", "-1"), "temperature is -1"),
        (("x", "--max-image-tokens", "280"), "--max-image-tokens is 280, but there is no --image"),
        ((" ",), "the prompt is ' '"),
        (("x", "--trace", "none/x"), "--trace none/x: there is no directory none."),
    ],
)
def test_what_can_be_refused_is_refused_before_anything_is_fetched(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    status, _, err = run(capsys, "someone/text", *argv)
    assert status == 2
    assert err.startswith(f"dgemma run: {said}")
    assert not hub.requests


def test_a_bundled_model_needs_no_hub(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "bundled:text", *ASK)
    assert status == 0
    assert json.loads(out)["text"]
    assert "to fetch" not in err


def test_a_prompt_in_place_of_the_model_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "Tell me a joke")
    assert status == 2
    assert "dgemma run bundled:text 'Tell me a joke'" in err


@pytest.mark.parametrize("field", ["quantization_config", "quantization"])
def test_a_quantized_checkpoint_is_taken_as_it_is(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one of mlx-vlm, which has another field."""
    config = json.loads((bundled_path("text") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: {"bits": 4, "group_size": 32}}))
    assert prepare(str(tmp_path), "auto", "cpu") == tmp_path
    assert "in memory, as it is" in capsys.readouterr().err
