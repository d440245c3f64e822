"""Tied weights under either name or both, and layouts that may be written in more than one way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.quantized.quantized_files import (
    CPU,
    DATA,
    DECODER,
    ENCODER,
    EXPERT,
    NAMES,
    Tensors,
    copy_of,
    decoded,
    edit_recipe,
    edit_tensors,
    expected_of,
    quantized_modules,
    reads_as_its_tool_does,
    recipe_of,
    same_bits,
    tensors_of,
)
from dgemma.checkpoint.load import load_transformer
from dgemma.checkpoint.quantized.schemes import (
    CompressedPacked,
    CompressedScaled,
    Part,
    QuantizationScheme,
)
from dgemma.checkpoint.quantized.tensor_index import _scheme_of
from dgemma.checkpoint.safetensors_file import TensorEntry
from dgemma.checkpoint.source import open_checkpoint
from dgemma.errors import CheckpointError


def test_scales_for_activations_and_for_the_context_are_read_over(tmp_path: Path) -> None:
    """Those of the tools are in their fixtures; where compressed-tensors puts the context's, here."""
    modelopt, compressed = tensors_of(DATA / "modelopt-nvfp4"), tensors_of(DATA / "ct-nvfp4")
    for scale in ("layers.0.self_attn.k_proj.k_scale", "layers.1.self_attn.v_proj.v_scale"):
        assert DECODER + scale in modelopt
        assert ENCODER + scale in modelopt
    assert f"{EXPERT}.input_scale" in modelopt
    assert f"{EXPERT}.input_global_scale" in compressed
    directory = copy_of("ct-int8", tmp_path / "model")
    names = [f"{prefix}layers.1.self_attn.{x}_scale" for prefix in (DECODER, ENCODER) for x in "qkv"]
    edit_tensors(directory, lambda t: t.update({name: torch.ones(1) for name in names}))
    assert reads_as_its_tool_does("ct-int8", directory)


def scales_beside(module: str, tensors: Tensors) -> list[str]:
    """Of the gates and ups of all experts of a layer: they are one bank, and alike."""
    experts_linear = module.partition(".experts.")[0] + ".experts."
    return [
        n
        for n in tensors
        if n.startswith(experts_linear) and n.endswith(("gate_proj.weight_scale", "up_proj.weight_scale"))
    ]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", ["ct-fp8-channel", "ct-int8"])
def test_one_scale_may_serve_a_whole_matrix(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    directory = copy_of(name, tmp_path / "model")
    scale = torch.full(shape, 0.0123)
    edit_tensors(directory, lambda t: t.update(dict.fromkeys(scales_beside(EXPERT, t), scale)))
    found = decoded(open_checkpoint(directory), torch.float32)[EXPERT]
    assert same_bits(found, tensors_of(directory)[f"{EXPERT}.weight"].float() * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["ct-fp8-channel", "ct-int8"])
def test_scales_may_be_a_flat_list_and_of_any_float(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = copy_of(name, tmp_path / "model")
    scale = torch.rand(32, generator=torch.Generator().manual_seed(0)).to(dtype)
    edit_tensors(directory, lambda t: t.update(dict.fromkeys(scales_beside(EXPERT, t), scale)))
    found = decoded(open_checkpoint(directory), torch.float32)[EXPERT]
    assert same_bits(found, tensors_of(directory)[f"{EXPERT}.weight"].float() * scale.float()[:, None])


@pytest.mark.parametrize("name", ["ct-int4", "ct-int4-asymmetric"])
def test_packed_codes_need_no_weight_shape(name: str, tmp_path: Path) -> None:
    directory = copy_of(name, tmp_path / "model")

    def drop(tensors: Tensors) -> None:
        for part in [n for n in tensors if n.endswith(".weight_shape")]:
            del tensors[part]

    edit_tensors(directory, drop)
    assert reads_as_its_tool_does(name, directory)


@pytest.mark.parametrize("name", ["ct-fp8-channel", "ct-int8"])
def test_naive_is_another_name_of_the_same_layout(name: str, tmp_path: Path) -> None:
    directory = copy_of(name, tmp_path / "model")

    def rename(recipe: dict[str, Any]) -> None:
        recipe["format"] = next(iter(recipe["config_groups"].values()))["format"] = "naive-quantized"

    edit_recipe(directory, rename)
    assert reads_as_its_tool_does(name, directory)


@pytest.mark.parametrize("order", [list, reversed])
def test_of_groups_in_one_layout_a_weight_gets_the_one_it_was_written_in(
    order: Callable[[Any], Iterable[Any]], tmp_path: Path
) -> None:
    directory = copy_of("ct-mixed", tmp_path / "model")
    groups = dict(order(list(recipe_of("ct-mixed")["config_groups"].items())))
    edit_recipe(directory, lambda r: r.update(config_groups=groups))
    schemes = {name: entry.scheme for name, entry in open_checkpoint(directory).quantized.items()}
    experts, mlp, attention = (
        schemes[f"{DECODER}layers.0.{leaf}"]
        for leaf in ("experts.down_proj", "mlp.up_proj.weight", "self_attn.k_proj.weight")
    )
    assert experts == CompressedPacked(bits=4, group_len=16)
    assert mlp == CompressedPacked(bits=8, group_len=None)
    assert attention == CompressedPacked(bits=4, group_len=16, symmetric=False)
    assert isinstance(schemes[f"{DECODER}layers.1.self_attn.k_proj.weight"], CompressedScaled)
    assert reads_as_its_tool_does("ct-mixed", directory)


# --- tied copies


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    """The quantized tensors whose names begin with `old`, under their other name."""
    quantized = [n for names in quantized_modules(tensors).values() for n in names if n.startswith(old)]
    return {new + name.removeprefix(old): tensors[name].clone() for name in quantized}


def move_to_encoder(tensors: Tensors) -> None:
    moved = renamed(tensors, DECODER + "layers.", ENCODER + "layers.")
    assert moved
    for name in moved:
        del tensors[DECODER + name.removeprefix(ENCODER)]
    tensors.update(moved)


def copy_to_encoder(tensors: Tensors) -> None:
    copies = renamed(tensors, DECODER + "layers.", ENCODER + "layers.")
    assert copies
    tensors.update(copies)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [move_to_encoder, copy_to_encoder])
def test_either_name_of_a_tied_weight_serves_and_so_do_both(
    name: str, change: Callable[[Tensors], None], tmp_path: Path
) -> None:
    directory = copy_of(name, tmp_path / "model")
    edit_tensors(directory, change)
    there, here = open_checkpoint(directory), open_checkpoint(DATA / name)
    assert there.quantized.keys() == here.quantized.keys()
    assert bool(there.tied) == (change is copy_to_encoder)
    one = load_transformer(there, dtype=torch.bfloat16, device=CPU).state_dict()
    other = load_transformer(here, dtype=torch.bfloat16, device=CPU).state_dict()
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", NAMES)
def test_tied_copies_that_differ_are_refused_by_name_whichever_part_it_is(name: str, tmp_path: Path) -> None:
    directory = copy_of(name, tmp_path / "model")
    edit_tensors(directory, copy_to_encoder)
    copied = ENCODER + EXPERT.removeprefix(DECODER)
    activations = ("input_scale", "input_global_scale")
    parts = [n for n in quantized_modules(tensors_of(directory))[copied] if not n.endswith(activations)]
    assert len(parts) >= 2
    for part in parts:
        spoilt = tmp_path / part
        shutil.copytree(directory, spoilt)

        def spoil(tensors: Tensors, part: str = part) -> None:
            tensors[part].view(-1).view(torch.uint8)[0] ^= 1

        edit_tensors(spoilt, spoil)
        source = open_checkpoint(spoilt)
        with pytest.raises(CheckpointError) as caught:
            load_transformer(source, dtype=torch.float32, device=CPU)
        original = DECODER + part.removeprefix(ENCODER)
        assert f"{part!r} differs from {original!r}, but this model ties them" in str(caught.value)


def test_tied_copies_in_two_formats_are_refused_by_name(tmp_path: Path) -> None:
    directory = copy_of("ct-nvfp4", tmp_path / "model")
    (group,) = recipe_of("ct-fp8-channel")["config_groups"].values()
    edit_recipe(directory, lambda r: r["config_groups"].update(other=group))
    numbers = expected_of("ct-nvfp4")

    def add(tensors: Tensors) -> None:
        for module in quantized_modules(tensors):
            if ".layers.0.experts." in module:
                copied = ENCODER + module.removeprefix(DECODER)
                tensors[f"{copied}.weight"] = numbers[module].to(torch.float8_e4m3fn)
                tensors[f"{copied}.weight_scale"] = torch.ones(len(numbers[module]), 1)

    edit_tensors(directory, add)
    copied = ENCODER + EXPERT.removeprefix(DECODER)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert f"{EXPERT!r} and its tied copy {copied!r} are quantized differently" in str(caught.value)


@pytest.mark.parametrize("prefix", [DECODER, ENCODER])
def test_a_plain_bank_beside_its_quantized_experts_is_refused_by_name(prefix: str, tmp_path: Path) -> None:
    directory = copy_of("ct-nvfp4", tmp_path / "model")
    name = prefix + "layers.0.experts.down_proj"
    edit_tensors(directory, lambda t: t.update({name: torch.zeros(4, 64, 32, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert f"tensors this model does not have: {name!r}" in str(caught.value)


class Named(QuantizationScheme):
    """A scheme of bytes under these names, one of which may be optional."""

    def __init__(self, name: str, *parts: str, optional: str = "") -> None:
        self.name, self.optional = name, (optional,)
        self._parts = {part: Part(("U8",), ((1,),)) for part in parts}

    @property
    def unit(self) -> int:
        return 1

    def parts(self, out: int, inner: int) -> dict[str, Part]:
        return self._parts


@pytest.mark.parametrize(
    ("schemes", "best"),
    [
        # An optional part that is missing is no fault, a required one is.
        ((Named("a", "weight", "scale"), Named("b", "weight", "zero", optional="zero")), "b"),
        # As many right parts outweigh as many missing ones, and no more.
        ((Named("a", "weight", "shape", "x", "y", "z"), Named("b", "weight", "x")), "b"),
        # Of equals the first.
        ((Named("a", "weight", "x"), Named("b", "weight", "y")), "a"),
        # The first part must be there.
        ((Named("a", "x", "weight", "shape"), Named("b", "weight", "x", "y", "z")), "b"),
    ],
)
def test_of_several_schemes_the_best_fit_is_taken(schemes: tuple[Named, ...], best: str) -> None:
    found = {name: TensorEntry(name, "U8", (1,), Path("model"), 0, 1) for name in ("m.weight", "m.shape")}
    scheme = _scheme_of("m", 1, 1, found, schemes)
    assert scheme is not None
    assert scheme.name == best
