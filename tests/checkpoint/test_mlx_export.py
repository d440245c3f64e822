"""The MLX export is read back within a step or two of the original, and generates as its decoded form.

That MLX decodes the same numbers, and mlx-vlm computes the same logits, `make others` shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint.plain_form import CPU, answer, read_all, write_plain
from dgemma.checkpoint.export import write_export
from dgemma.checkpoint.mlx_export import plan_mlx, to_mlx
from dgemma.checkpoint.quantized.reader import read_quantized
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.safetensors_file import read_entries
from dgemma.checkpoint.source import open_checkpoint
from dgemma.cli.main import main
from dgemma.errors import InputError
from dgemma.model.config import ModelConfig
from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind
from gguf_files import tiny_config


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model"
    write_random(path, tiny_config(), seed=2)
    return path


@pytest.mark.parametrize(("name", "bits"), [("4bit", 4), ("8bit", 8)])
def test_it_is_read_back_and_generates_the_text_of_its_decoded_form(
    name: str, bits: int, plain: Path, tmp_path: Path
) -> None:
    assert main(["export", str(plain), str(tmp_path / "mlx"), "--to", "mlx", "--format", name]) == 0
    source, original = open_checkpoint(tmp_path / "mlx"), read_all(open_checkpoint(plain))
    found = read_all(source)
    experts = read_quantized(source.quantized["model.decoder.layers.0.experts.down_proj"], CPU)
    others = read_quantized(source.quantized["model.decoder.embed_tokens.weight"], CPU)
    assert (experts.kind is QuantKind.INT4) == (bits == 4)
    assert others.kind is QuantKind.INT8
    assert "model.decoder.layers.0.router.proj.weight" in source.entries
    for weight in original:
        if weight in source.entries:
            assert torch.equal(found[weight], original[weight])
        else:
            packed = read_quantized(source.quantized[weight], CPU)
            step = packed.scale.float().abs().repeat_interleave(64, -1)
            # A step, and what bf16 loses of a scale and of a sum.
            error = (found[weight] - original[weight]).abs()
            assert (error <= (1.1 if packed.kind is QuantKind.INT4 else 2.0) * step).all(), weight
    assert answer(tmp_path / "mlx") == answer(write_plain(tmp_path / "fp32", source.config, found))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_farther_end_of_a_group_is_exact_and_the_other_within_a_step(bits: int) -> None:
    rows = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    rows[0], rows[1], rows[2], rows[3] = 0, 5.0, -rows[2].abs(), rows[3].abs()
    values, scale, bias = to_mlx(rows, bits, torch.float32)
    kind = QuantKind.INT4 if bits == 4 else QuantKind.INT8
    found = QuantizedTensor(kind, values, scale, bias=bias).dequantize(torch.float32)
    step = scale.abs().repeat_interleave(64, -1)
    error = (found - rows).abs() - 1e-6
    assert (error <= 1.0001 * step).all()
    assert (error <= 0.5001 * step).float().mean() > 0.95
    groups, near = rows.unflatten(-1, (-1, 64)), found.unflatten(-1, (-1, 64))
    farthest = groups.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(near.gather(-1, farthest), groups.gather(-1, farthest))


def test_a_scale_that_fp16_rounds_to_zero_divides_nothing() -> None:
    values, scale, _ = to_mlx(torch.full((1, 64), 1e-9), 4, torch.float16)
    assert scale.float().abs().min() > 0
    assert values.max() <= 255


def test_an_interrupted_export_goes_on(plain: Path, tmp_path: Path) -> None:
    export = plan_mlx(open_checkpoint(plain), name="4bit")
    calls = 0

    def stop(count: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_export(tmp_path / "mlx", export, max_shard_bytes=60_000, on_bytes=stop)
    assert not (tmp_path / "mlx" / "config.json").exists()
    write_export(tmp_path / "mlx", plan_mlx(open_checkpoint(plain), name="4bit"), max_shard_bytes=60_000)
    write_export(tmp_path / "whole", plan_mlx(open_checkpoint(plain), name="4bit"))
    found, whole = (read_all(open_checkpoint(tmp_path / name)) for name in ("mlx", "whole"))
    for name, numbers in whole.items():
        assert torch.equal(found[name], numbers), name
    shapes = {entry.name: entry.shape for entry in read_entries(tmp_path / "whole" / "model.safetensors")}
    assert shapes["model.decoder.layers.0.experts.gate_up_proj.weight"] == (4, 512, 32)


def test_rows_that_are_not_whole_groups_are_refused(tmp_path: Path) -> None:
    raw = tiny_config().to_json()
    raw["text_config"]["moe_intermediate_size"] = 96
    write_random(tmp_path / "model", ModelConfig.from_json(raw), companions=())
    with pytest.raises(InputError, match="groups of 64 numbers, but the experts' rows are 256 and 96"):
        plan_mlx(open_checkpoint(tmp_path / "model"), name="4bit")
