"""The gguf package reads what we write and finds our numbers; we read it back as the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import dgemma
from checkpoint.plain_form import answer, read_all, write_plain
from dgemma.checkpoint import gguf_writer
from dgemma.checkpoint.export import plan_export, write_export
from dgemma.checkpoint.gguf_export import plan_gguf, to_q8_0, write_gguf
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import open_checkpoint
from dgemma.cli.main import main
from dgemma.errors import CheckpointError, InputError
from dgemma.model.config import ModelConfig
from gguf_files import tiny_config


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in bf16, with the small tokenizer."""
    raw = tiny_config().to_json()
    raw["text_config"]["vocab_size"] = 2176  # the small tokenizer's, and some ids without a token
    path = tmp_path_factory.mktemp("plain") / "model"
    write_random(path, ModelConfig.from_json(raw), seed=1)
    return path


def export(plain: Path, path: Path, name: str) -> Path:
    write_gguf(path, plan_gguf(open_checkpoint(plain), name=name))
    return path


def test_blocks_of_q8_0_are_those_of_ggml() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 96, generator=generator) * torch.logspace(-12, 6, 64)[:, None]
    rows[0] = 0
    rows[1] = torch.arange(96) - 63.5  # ties
    rows[2, :32] = 127.0
    rows[3] = rows[3].bfloat16()
    expected = gguf.quantize(rows.clamp(-60_000, 60_000).numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(to_q8_0(rows.clamp(-60_000, 60_000)).numpy(), expected)


@pytest.mark.parametrize("name", ["q8_0", "f16", "bf16"])
def test_the_package_reads_what_was_written_and_so_do_we(name: str, plain: Path, tmp_path: Path) -> None:
    path = export(plain, tmp_path / "model.gguf", name)
    reader = gguf.GGUFReader(path)
    source, original = open_checkpoint(path), open_checkpoint(plain)
    assert source.config == original.config
    entries = {entry.name: spec for spec, entry in source.entries.items()}
    entries |= {entry.modules[0].module: spec for spec, entry in source.quantized.items()}
    found, numbers = read_all(source), read_all(original)
    types = set()
    for tensor in reader.tensors:
        if tensor.name != "rope_freqs.weight":
            theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(theirs, found[entries[tensor.name]].numpy()), tensor.name
            types.add(tensor.tensor_type.name)
    assert len(reader.tensors) == len(found) + 1
    assert types == {"F32", name.upper()}
    for spec, exact in numbers.items():
        tolerance = {"q8_0": exact.abs().max() / 200, "f16": exact.abs().max() / 2000, "bf16": 0}[name]
        assert (found[spec] - exact).abs().max() <= tolerance, spec


@pytest.mark.parametrize("name", ["q8_0", "bf16"])
def test_it_generates_the_text_of_its_decoded_form(name: str, plain: Path, tmp_path: Path) -> None:
    path = export(plain, tmp_path / "model.gguf", name)
    source = open_checkpoint(path)
    decoded = answer(write_plain(tmp_path / "plain", source.config, read_all(source)))
    assert answer(path) == decoded
    if name == "bf16":
        assert decoded == answer(plain)


def test_text_and_defaults_come_along(plain: Path, tmp_path: Path) -> None:
    path = export(plain, tmp_path / "model.gguf", "q8_0")
    ours, original = dgemma.load(path), dgemma.load(plain)
    text = "Why is the sea\n\n<|turn> salty?"
    assert ours.tokenizer.encode(text) == original.tokenizer.encode(text)
    assert ours.tokenizer.template_names["bos_token"] == original.tokenizer.template_names["bos_token"]
    messages = [{"role": "user", "content": text}]
    assert ours.chat_template.render(messages) == original.chat_template.render(messages)
    assert ours.generation_defaults == original.generation_defaults
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.model"].contents() == "gemma4"
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert len(tokens) == len(types) == 2176
    by_token = dict(zip(tokens, types, strict=True))
    assert (by_token["<|turn>"], by_token["▁the"], by_token["<0x0A>"], by_token["[PAD2175]"]) == (3, 1, 6, 5)
    assert fields["tokenizer.ggml.eot_token_id"].contents() == 106


def test_a_gguf_file_exports_to_the_released_layout_with_its_text(plain: Path, tmp_path: Path) -> None:
    path = export(plain, tmp_path / "model.gguf", "bf16")
    write_export(tmp_path / "back", plan_export(open_checkpoint(path)))
    back, original = open_checkpoint(tmp_path / "back"), open_checkpoint(plain)
    for name, numbers in read_all(original).items():
        assert torch.equal(read_all(back)[name], numbers), name
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / file).read_text() == (plain / file).read_text()
    files = (at / "generation_config.json" for at in (tmp_path / "back", plain))
    first, second = (json.loads(file.read_text()) for file in files)
    for name in ("eos_token_id", "sampler_config", "t_max"):
        assert first[name] == second[name]


def test_the_command_writes_it_and_refuses_by_name(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        status = main(["export", str(plain), *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    out = tmp_path / "m.gguf"
    status, printed = run(str(out), "--to", "gguf")
    assert status == 0
    assert "in q8_0, " in printed
    assert "a llama.cpp pull request that is still open" in printed
    for arguments, words in (
        ((str(out), "--to", "gguf"), "which exists; choose another name"),
        ((str(tmp_path / "m"), "--to", "gguf"), "a GGUF file has a name that ends in .gguf"),
        (
            (str(tmp_path / "n.gguf"), "--to", "gguf", "--format", "4bit"),
            "of --to gguf it is q8_0 or",
        ),
        ((str(tmp_path / "n"), "--format", "q8_0"), "--to hf has none"),
    ):
        status, printed = run(*arguments)
        assert status != 0
        assert words in printed


def test_numbers_that_f16_has_not_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    weights = {name: n.clone() for name, n in read_all(open_checkpoint(small(tmp_path / "small"))).items()}
    weights["model.decoder.layers.0.self_attn.q_proj.weight"][0, 0] = 1e6
    write_plain(tmp_path / "model", tiny_config(), weights)
    with pytest.raises(CheckpointError, match=r"q_proj.weight' holds numbers that F16 has not; take bf16"):
        export(tmp_path / "model", tmp_path / "m.gguf", "f16")
    assert not list(tmp_path.glob("*gguf*"))


def small(path: Path) -> Path:
    write_random(path, tiny_config(), seed=1, dtype="F32", companions=())
    return path


def test_sliding_layers_whose_heads_rotate_in_part_are_refused(tmp_path: Path) -> None:
    raw = tiny_config().to_json()
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    raw["text_config"]["rope_parameters"]["sliding_attention"] = rope
    write_random(tmp_path / "model", ModelConfig.from_json(raw), companions=())
    with pytest.raises(CheckpointError, match=r"a share of 0.5 of the sliding layers' heads rotates"):
        plan_gguf(open_checkpoint(tmp_path / "model"), name="q8_0")


def with_file(plain: Path, directory: Path, name: str, content: str) -> Path:
    shutil.copytree(plain, directory)
    (directory / name).write_text(content)
    return directory


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"model": {"type": "BPE"}}', "KeyError: 'vocab'"),
        ('{"model": {"type": "BPE", "vocab": {}}, "added_tokens": [{"id": 0}]}', "KeyError: 'content'"),
        (
            '{"model": {"type": "BPE", "vocab": {}}, "added_tokens": [{"id": 0, "content": 7}]}',
            "a token or a merge is no text",
        ),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"], 3]}}', "a token or a merge"),
    ],
)
def test_a_broken_tokenizer_is_refused_by_name(
    content: str, problem: str, plain: Path, tmp_path: Path
) -> None:
    broken = with_file(plain, tmp_path / "model", "tokenizer.json", content)
    with pytest.raises(CheckpointError, match=f"tokenizer.json .* is truncated or corrupt: .*{problem}"):
        plan_gguf(open_checkpoint(broken), name="bf16")


def test_a_chat_template_that_is_no_text_is_refused(plain: Path, tmp_path: Path) -> None:
    broken = with_file(plain, tmp_path / "model", "chat_template.jinja", "")
    (broken / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja .* UnicodeDecodeError"):
        plan_gguf(open_checkpoint(broken), name="bf16")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id is -1, which"),
        ({"eos_token_id": [1, 1 << 32]}, "tokenizer.ggml.eot_token_id is 4294967296, which"),
        ({"t_min": 1e300}, r"diffusion.eb_t_min is 1e\+300, which"),
    ],
)
def test_a_number_that_gguf_has_not_is_refused(
    options: dict[str, object], problem: str, plain: Path, tmp_path: Path
) -> None:
    source = open_checkpoint(with_file(plain, tmp_path / "m", "generation_config.json", json.dumps(options)))
    with pytest.raises(CheckpointError, match=problem):
        write_gguf(tmp_path / "model.gguf", plan_gguf(source, name="bf16"))
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_an_option_keeps_its_type_however_it_was_spelled(plain: Path, tmp_path: Path) -> None:
    options = json.dumps({"t_max": 1, "stability_threshold": 2})
    path = export(
        with_file(plain, tmp_path / "m", "generation_config.json", options), tmp_path / "m.gguf", "bf16"
    )
    fields = gguf.GGUFReader(path).fields
    assert fields["diffusion.eb_t_max"].types == [gguf.GGUFValueType.FLOAT32]
    assert fields["diffusion.eb_stability_threshold"].types == [gguf.GGUFValueType.UINT32]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        gguf_writer.write_gguf_file(tmp_path / "absent" / "m.gguf", {}, [])
    with pytest.raises(InputError, match=r"ends in \.gguf"):
        export(small(tmp_path / "model"), tmp_path / "m.bin", "q8_0")
