"""What `quantize` writes is what it should, whole, and the same after an interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dgemma
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.quantized.quantization_config import NAMES, quantization_config_for
from dgemma.checkpoint.quantized.reader import read_module, read_tensor
from dgemma.checkpoint.quantized.rounding import to_int4, to_int8, to_nvfp4
from dgemma.checkpoint.quantized.writer import (
    QuantizationSource,
    disk_bytes,
    from_checkpoint,
    from_random,
    shards_of,
    write_quantized,
)
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.save import JOURNAL
from dgemma.checkpoint.source import open_checkpoint
from dgemma.errors import CheckpointError, InputError
from dgemma.loading import load
from dgemma.model.quantized_linear import QuantizedWeight
from dgemma.model.quantized_tensor import FLOAT4_NUMBERS

CONFIG = PRESETS["tiny"].config


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model"
    write_random(path, CONFIG, seed=3)
    return path


def quantized(plain: Path, out: Path, name: str) -> Path:
    source = open_checkpoint(plain)
    write_quantized(out, from_checkpoint(source), quantization_config_for(name, source.config))
    return out


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_is_rounded_in_its_format_and_the_rest_is_untouched(
    plain: Path, tmp_path: Path, name: str
) -> None:
    before = load(plain, dtype="float32").transformer
    after = load(quantized(plain, tmp_path / "q", name), dtype="float32").transformer
    counts = {"kept": 0, "rounded": 0}
    for spec in tensor_specs(CONFIG):
        parent, _, leaf = spec.path.rpartition(".")
        weight = getattr(before.get_submodule(parent), leaf)
        module = after.get_submodule(parent)
        if spec.part == "router" or len(spec.shape) < 2:
            assert torch.equal(getattr(module, leaf), weight), spec.name
            counts["kept"] += 1
            continue
        counts["rounded"] += 1
        assert isinstance(module, QuantizedWeight)
        found = module.quantized.dequantize(torch.float32)
        if spec.part != "experts" or name == "int8":
            expected = to_int8(weight.flatten(0, -2)).dequantize(torch.float32).view_as(weight)
        elif name == "int4":
            expected = to_int4(weight.flatten(0, -2), 32).dequantize(torch.float32).view_as(weight)
        else:  # an outer scale to each linear, as the experts are taken apart
            halves = weight.chunk(2, dim=1) if "gate_up" in spec.path else (weight,)
            fake_quantize_activations = [
                [to_nvfp4(one).dequantize(torch.float32) for one in half] for half in halves
            ]
            expected = torch.cat([torch.stack(half) for half in fake_quantize_activations], dim=1)
        assert torch.equal(found, expected), spec.name
    # Embedding, self-conditioning; in each of three layers q, k, o, the MLP and two banks; two have a v.
    assert counts["rounded"] == 1 + 3 + 3 * (3 + 3 + 2) + 2


@pytest.mark.parametrize("name", NAMES)
def test_the_size_is_known_before(plain: Path, tmp_path: Path, name: str) -> None:
    source = open_checkpoint(plain)
    expected = disk_bytes(shards_of(from_checkpoint(source), quantization_config_for(name, CONFIG)))
    assert open_checkpoint(quantized(plain, tmp_path / "q", name)).nbytes == expected
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == expected


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_run_goes_on_and_ends_with_the_same_files(
    plain: Path, tmp_path: Path, name: str
) -> None:
    whole = contents(quantized(plain, tmp_path / "whole", name))
    source = open_checkpoint(plain)
    original, plan, out = from_checkpoint(source), quantization_config_for(name, CONFIG), tmp_path / "parts"
    left = 260_000

    def interrupt(count: int) -> None:
        nonlocal left
        left -= count
        if left < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantized(out, original, plan, on_bytes=interrupt)
    done = {file.name: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    assert done
    assert not (out / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(out)
    seen = []
    write_quantized(out, original, plan, on_bytes=seen.append)
    assert contents(out) == whole
    assert all((out / file).stat().st_mtime_ns == when for file, when in done.items())
    assert sum(seen) == disk_bytes(shards_of(original, plan))


def test_rows_of_any_length_are_quantized(tmp_path: Path) -> None:
    """A file has whole 8-byte words first, so the scales of such weights come before their quantized data."""
    config = replace(CONFIG, hidden_size=36, mlp_size=97)
    write_random(tmp_path / "odd", config)
    out = quantized(tmp_path / "odd", tmp_path / "q", "int8")
    original, found = open_checkpoint(tmp_path / "odd"), open_checkpoint(out)
    for name, entry in found.quantized.items():
        exact = read_tensor(original.entries[name]).float().view(-1, entry.shape[-1])
        rows = torch.cat([read_module(entry, module).dequantize(torch.float32) for module in entry.modules])
        assert (rows - exact).abs().max() <= exact.abs().max() / 200, name


def test_random_weights_are_quantized_as_if_they_had_been_written_first(plain: Path, tmp_path: Path) -> None:
    made = from_random(CONFIG, seed=3)
    write_quantized(tmp_path / "direct", made, quantization_config_for("int4", CONFIG))
    after = contents(quantized(plain, tmp_path / "by-file", "int4"))
    direct = contents(tmp_path / "direct")
    weights = [name for name in direct if name.endswith(".safetensors")]
    assert len(weights) == 5
    assert all(direct[name] == after[name] for name in weights)


def interrupted(original: QuantizationSource, out: Path, name: str, after: int) -> list[str]:
    """Quantize up to `after` bytes -> the files of weights that are complete."""
    left = after

    def interrupt(count: int) -> None:
        nonlocal left
        left -= count
        if left < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantized(out, original, quantization_config_for(name, CONFIG), on_bytes=interrupt)
    return sorted(file.name for file in out.glob("*.safetensors"))


@pytest.mark.parametrize("damage", ["zeroed", "zeroed tail", "cut", "another file", "unlisted"])
def test_a_damaged_file_of_an_interrupted_run_is_written_again(
    plain: Path, tmp_path: Path, damage: str
) -> None:
    whole = contents(quantized(plain, tmp_path / "whole", "int4"))
    original, out = from_checkpoint(open_checkpoint(plain)), tmp_path / "q"
    first, second = interrupted(original, out, "int4", 260_000)[:2]
    content = (out / second).read_bytes()
    if damage == "unlisted":  # killed after the file got its name and before it was noted
        journal = json.loads((out / JOURNAL).read_text())
        del journal["files"][second]
        (out / JOURNAL).write_text(json.dumps(journal))
    spoilt = {
        "zeroed": bytes(len(content)),
        "zeroed tail": content[:-4096] + bytes(4096),
        "cut": content[:-1],
        "another file": (out / first).read_bytes(),
        "unlisted": bytes(len(content)),
    }[damage]
    (out / second).write_bytes(spoilt)
    write_quantized(out, original, quantization_config_for("int4", CONFIG))
    assert contents(out) == whole


@pytest.mark.parametrize("left", [0, 1, 40, -3])
def test_a_torn_journal_is_refused_with_a_remedy(plain: Path, tmp_path: Path, left: int) -> None:
    original, out = from_checkpoint(open_checkpoint(plain)), tmp_path / "q"
    interrupted(original, out, "int4", 200_000)
    (out / JOURNAL).write_bytes((out / JOURNAL).read_bytes()[:left])
    before = contents(out)
    with pytest.raises(CheckpointError, match=r"unfinished\.json is not valid JSON.* remove it, or choose"):
        quantized(plain, out, "int4")
    assert contents(out) == before


def test_a_journal_of_another_shape_is_refused(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    interrupted(from_checkpoint(open_checkpoint(plain)), out, "int4", 200_000)
    (out / JOURNAL).write_text('{"of": "x"}')
    with pytest.raises(CheckpointError, match=r"unfinished\.json has no 'of' and 'files'; it is corrupt"):
        quantized(plain, out, "int4")


def test_a_target_that_is_taken_is_refused(plain: Path, tmp_path: Path) -> None:
    out = quantized(plain, tmp_path / "q", "int4")
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        quantized(plain, out, "int4")
    (out / "config.json").unlink()
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        quantized(plain, out, "int4")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        quantized(plain, tmp_path / "file", "int4")


def test_the_unfinished_work_of_another_run_is_refused(plain: Path, tmp_path: Path) -> None:
    original, out = from_checkpoint(open_checkpoint(plain)), tmp_path / "q"
    interrupted(original, out, "int4", 200_000)
    before = contents(out)
    deeper = replace(CONFIG, window=CONFIG.window * 2)
    for other, name in (
        (original, "int8"),
        (replace(original, fingerprint="other"), "int4"),
        (replace(original, raw_config={**deeper.to_json(), "dtype": "bfloat16"}), "int4"),
    ):
        with pytest.raises(CheckpointError, match="unfinished work of another model, format or option; rem"):
            write_quantized(out, other, quantization_config_for(name, CONFIG))
    assert contents(out) == before


def test_what_is_quantized_is_not_quantized_again(plain: Path, tmp_path: Path) -> None:
    out = quantized(plain, tmp_path / "q", "int8")
    with pytest.raises(
        CheckpointError, match=r"is quantized \(compressed-tensors int-quantized\); quantizing"
    ):
        from_checkpoint(open_checkpoint(out))
    with pytest.raises(InputError, match="quantized; copy its directory"):
        load(out).save(tmp_path / "again")


def test_rows_that_hold_no_whole_groups_are_refused() -> None:
    odd = replace(CONFIG, expert_size=20)
    with pytest.raises(InputError, match=r"int4 has groups of 8 numbers, but .* 64 and 20 long. Use int8"):
        quantization_config_for("int4", odd)
    assert quantization_config_for("int4", replace(CONFIG, expert_size=48)).experts.unit == 16
    with pytest.raises(InputError, match="known: int8, int4, nvfp4"):
        quantization_config_for("int3", CONFIG)


def numbers(rows: int, inner: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    made = torch.randn((rows, inner), generator=g) * torch.rand((rows, 1), generator=g)
    made[1] = 0
    made[2, 5] = 40.0
    return made


def test_eight_bits_err_by_half_a_step_at_most() -> None:
    w = numbers(12, 64)
    quantized = to_int8(w)
    assert ((quantized.dequantize(torch.float32) - w).abs() <= quantized.scale.float() * 0.5001 + 1e-30).all()
    assert quantized.dequantize(torch.float32)[1].eq(0).all()


def test_the_cut_of_four_bits_never_makes_it_worse() -> None:
    w = numbers(12, 64)
    groups = w.unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp(min=2.0**-100).bfloat16().float()
    uncut = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1)
    chosen = (to_int4(w, 32).dequantize(torch.float32) - w).square().unflatten(-1, (-1, 32)).sum(-1)
    assert (chosen <= uncut * 1.0001).all()
    assert (chosen < uncut * 0.9).any()
    assert to_int4(w, 32).dequantize(torch.float32)[1].eq(0).all()


def test_a_four_bit_float_is_the_nearest_one_and_ties_go_to_even() -> None:
    quantized = to_nvfp4(numbers(12, 64))
    exact = numbers(12, 64).unflatten(-1, (-1, 16)) / quantized.group_scales()[..., None]
    table = torch.tensor([*FLOAT4_NUMBERS, *(-n for n in FLOAT4_NUMBERS)])
    nearest = (exact[..., None] - table).abs().amin(-1)
    found = (quantized.unscaled().unflatten(-1, (-1, 16)) - exact).abs()
    assert torch.allclose(found, nearest, atol=1e-6)
    ties = torch.tensor(
        [[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, *[-0.25, -0.75, -2.5, -5.0], 0, 0, 0, 0]]
    )
    even = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -1.0, -2.0, -4.0, 0, 0, 0, 0]
    assert to_nvfp4(ties).unscaled().tolist() == [even]


def test_an_adapter_of_the_original_fits_the_quantized_model(plain: Path, tmp_path: Path) -> None:
    settings = dgemma.LoraSettings(rank=2, expert_rank=2)
    load(plain).with_adapter(settings).save_adapter(tmp_path / "adapter")
    out = quantized(plain, tmp_path / "q", "int4")
    assert load(out, adapter=tmp_path / "adapter").generate([1, 2, 3], max_tokens=8, seed=1).tokens
    other = tmp_path / "other"
    write_random(other, CONFIG, seed=4)
    with pytest.raises(CheckpointError, match="was made for the base"):
        load(quantized(other, tmp_path / "q2", "int4"), adapter=tmp_path / "adapter")
