"""Ways to break a quantized checkpoint: what its headers say, what its tensors hold.

Each takes the directory of a tool's checkpoint and returns what the error must say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from broken_checkpoints import Break, edit_config
from checkpoint.quantized.broken_recipes import COMPRESSED, PACKED
from checkpoint.quantized.quantized_files import EXPERT, Tensors, edit_recipe, edit_tensors, weights_of

HEADERS: list[tuple[str, Break]] = []  # (the fixture it breaks, the break)
CONTENTS: list[tuple[str, Break]] = []


def header(*fixtures: str) -> Callable[[Break], Break]:
    return _added_to(HEADERS, fixtures)


def contents(*fixtures: str) -> Callable[[Break], Break]:
    return _added_to(CONTENTS, fixtures)


def _added_to(cases: list[tuple[str, Break]], fixtures: tuple[str, ...]) -> Callable[[Break], Break]:
    def add(function: Break) -> Break:
        cases.extend((fixture, function) for fixture in fixtures)
        return function

    return add


# --- what the headers say


def replace(part: str, change: Callable[[Tensor], Tensor], module: str = EXPERT) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{module}.{part}"] = change(tensors[f"{module}.{part}"]).contiguous()

    return edit


def drop(part: str, module: str = EXPERT) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[f"{module}.{part}"]

    return edit


def half(tensor: Tensor) -> Tensor:
    """Every other column."""
    return tensor[..., ::2]


@header("modelopt-nvfp4", "ct-fp8-channel", "ct-fp8-block", "ct-nvfp4", "ct-int8", *PACKED)
def a_scale_is_missing(d: Path) -> str:
    edit_tensors(d, drop("weight_scale"))
    return f"{EXPERT!r} lacks 'weight_scale'; the file is incomplete"


@header("modelopt-nvfp4")
def the_outer_scale_is_missing(d: Path) -> str:
    edit_tensors(d, drop("weight_scale_2"))
    return f"{EXPERT!r} lacks 'weight_scale_2'"


@header("ct-nvfp4")
def the_global_scale_is_missing(d: Path) -> str:
    edit_tensors(d, drop("weight_global_scale"))
    return f"{EXPERT!r} lacks 'weight_global_scale'"


@header("ct-int4-asymmetric")
def the_zero_point_is_missing(d: Path) -> str:
    edit_tensors(d, drop("weight_zero_point"))
    return f"{EXPERT!r} lacks 'weight_zero_point'"


@header("awq-gemm")
def the_zeros_are_missing(d: Path) -> str:
    edit_tensors(d, drop("qzeros"))
    return f"{EXPERT!r} lacks 'qzeros'"


@header("ct-nvfp4")
def an_expert_is_missing(d: Path) -> str:
    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".layers.1.experts.3.up_proj." in n]:
            del tensors[name]

    edit_tensors(d, edit)
    return "layers.1.experts.3.up_proj' lacks 'weight_packed'"


@header("ct-int4")
def a_zero_point_nobody_asked_for(d: Path) -> str:
    def edit(tensors: Tensors) -> None:
        rows, groups = tensors[f"{EXPERT}.weight_scale"].shape
        tensors[f"{EXPERT}.weight_zero_point"] = torch.zeros(rows // 8, groups, dtype=torch.int32)

    edit_tensors(d, edit)
    return f"tensors this model does not have: '{EXPERT}.weight_zero_point'"


@header(*PACKED)
def a_reordering_nobody_mentioned(d: Path) -> str:
    edit_tensors(d, lambda t: t.update({f"{EXPERT}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}))
    return f"tensors this model does not have: '{EXPERT}.weight_g_idx'"


@header("modelopt-nvfp4")
def a_scale_for_the_inputs_channels(d: Path) -> str:
    edit_tensors(d, lambda t: t.update({f"{EXPERT}.pre_quant_scale": torch.ones(64)}))
    return f"tensors this model does not have: '{EXPERT}.pre_quant_scale'"


@header("modelopt-nvfp4", "ct-nvfp4")
def inner_scales_in_full(d: Path) -> str:
    edit_tensors(d, replace("weight_scale", Tensor.float))
    return f"'{EXPERT}.weight_scale' is stored as F32; this format has F8_E4M3"


@header("modelopt-nvfp4")
def outer_scale_in_half(d: Path) -> str:
    edit_tensors(d, replace("weight_scale_2", Tensor.bfloat16))
    return f"'{EXPERT}.weight_scale_2' is stored as BF16; this format has F32"


@header("ct-fp8-channel", "ct-int8", "ct-int4")
def scales_of_integers(d: Path) -> str:
    edit_tensors(d, replace("weight_scale", lambda t: t.to(torch.int32)))
    return f"'{EXPERT}.weight_scale' is stored as I32; this format has F32 or BF16 or F16"


@header("ct-int4-asymmetric")
def zero_points_of_bytes(d: Path) -> str:
    edit_tensors(d, replace("weight_zero_point", lambda t: t.to(torch.int8)))
    return f"'{EXPERT}.weight_zero_point' is stored as I8; this format has I32"


@header("awq-gemm")
def zeros_of_floats(d: Path) -> str:
    edit_tensors(d, replace("qzeros", Tensor.float))
    return f"'{EXPERT}.qzeros' is stored as F32; this format has I32"


@header("ct-nvfp4")
def codes_of_another_kind_in_one_expert(d: Path) -> str:
    other = EXPERT.replace("experts.0", "experts.2")
    edit_tensors(d, replace("weight_packed", lambda t: t.view(torch.int8), other))
    return f"'{other}.weight_packed' is stored as I8; this format has U8"


@header("ct-fp8-channel", "ct-fp8-block", "ct-int8", *PACKED)
def scales_of_another_float_in_one_expert(d: Path) -> str:
    other = EXPERT.replace("experts.0", "experts.2")
    edit_tensors(d, replace("weight_scale", Tensor.float, other))
    return f"'{other}.weight_scale' is stored as F32, but '{EXPERT}.weight_scale' as BF16"


@header("modelopt-nvfp4", "ct-nvfp4", *PACKED)
def longer_groups_than_the_recipe_has(d: Path) -> str:
    edit_tensors(d, replace("weight_scale", half))
    return f"'{EXPERT}.weight_scale' has shape [32, "


@header(*PACKED)
def a_recipe_with_shorter_groups_than_the_file(d: Path) -> str:
    edit_recipe(d, lambda r: weights_of(r).update(group_size=weights_of(r)["group_size"] // 2))
    return "The group size or the geometry is another one"


@header("awq-gemm")
def awq_with_shorter_groups_than_the_file(d: Path) -> str:
    edit_recipe(d, lambda r: r.update(group_size=r["group_size"] // 2))
    return "The group size or the geometry is another one"


@header("ct-fp8-block")
def larger_blocks_than_the_file(d: Path) -> str:
    edit_recipe(d, lambda r: weights_of(r).update(block_structure=[64, 32]))
    return "weight_scale' has shape"


@header("ct-fp8-channel", "ct-int8")
def fewer_scales_than_rows(d: Path) -> str:
    edit_tensors(d, replace("weight_scale", lambda t: t[:-1]))
    return f"'{EXPERT}.weight_scale' has shape [31, 1]; config.json requires [32, 1] or [32]"


@header("ct-int4")
def fewer_codes_than_the_model_has(d: Path) -> str:
    edit_tensors(d, replace("weight_packed", lambda t: t[:, :-1]))
    return f"'{EXPERT}.weight_packed' has shape [32, 7]; config.json requires [32, 8]"


@header("ct-int4-asymmetric")
def zero_points_packed_along_the_groups(d: Path) -> str:
    down = EXPERT.replace("gate", "down")
    edit_tensors(d, replace("weight_zero_point", Tensor.t, down))
    return f"'{down}.weight_zero_point' has shape [2, 8]; config.json requires [8, 2]"


@header("awq-gemm")
def awq_not_transposed(d: Path) -> str:
    edit_tensors(d, replace("qweight", Tensor.t))
    return f"'{EXPERT}.qweight' has shape [4, 64]; config.json requires [64, 4]"


@header("awq-gemm")
def awq_with_rows_that_are_not_whole_words(d: Path) -> str:
    def edit(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("gate_proj.scales", "up_proj.scales")):
                tensors[name] = torch.ones(len(tensor), 36, dtype=tensor.dtype)

    edit_tensors(d, edit)
    edit_config(d, lambda c: c["text_config"].update(moe_intermediate_size=36))
    return f"'{EXPERT}.qweight' has shape [64, 4]; config.json requires [64, 5]"


@header("ct-int4", "ct-int4-asymmetric")
def rows_that_are_not_whole_groups(d: Path) -> str:
    edit_recipe(d, lambda r: weights_of(r).update(group_size=48))
    return "has rows of 64, which are not whole groups of 48"


@header("awq-gemm")
def awq_rows_that_are_not_whole_groups(d: Path) -> str:
    edit_recipe(d, lambda r: r.update(group_size=48))
    return "has rows of 64, which are not whole groups of 48"


@header("ct-nvfp4", "modelopt-nvfp4")
def another_geometry(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(moe_intermediate_size=16))
    return "The group size or the geometry is another one"


@header("ct-fp8-channel")
def codes_without_a_recipe(d: Path) -> str:
    edit_config(d, lambda c: c.pop("quantization_config"))
    return "stored as F8_E4M3; supported: F32, BF16, F16"


@header("ct-nvfp4")
def packed_codes_without_a_recipe(d: Path) -> str:
    edit_config(d, lambda c: c.pop("quantization_config"))
    return "layers.0.experts.gate_up_proj'"


# --- what the tensors hold

ALL = ("modelopt-nvfp4", *COMPRESSED, "awq-gemm")
NVFP4 = ("modelopt-nvfp4", "ct-nvfp4")
LAST = EXPERT.replace("experts.0.gate", "experts.3.up")  # checked as the first is


def put(d: Path, value: float, *parts: str, module: str = EXPERT) -> None:
    """A number in place of the last of whichever part there is."""

    def edit(tensors: Tensors) -> None:
        part = next(tensors[f"{module}.{p}"] for p in parts if f"{module}.{p}" in tensors)
        part.view(-1)[-1:] = torch.tensor([value]).to(part.dtype)

    edit_tensors(d, edit)


@contents(*ALL)
def a_scale_is_not_a_number(d: Path) -> str:
    put(d, float("nan"), "weight_scale", "scales")
    return f"{EXPERT}: "


@contents(*ALL)
def the_last_expert_has_a_negative_scale(d: Path) -> str:
    put(d, -0.5, "weight_scale", "scales", module=LAST)
    return "a scale is -0.5; scales are finite and not negative"


@contents("ct-fp8-channel", "ct-fp8-block", "ct-int8", *PACKED, "awq-gemm")
def a_scale_is_infinite(d: Path) -> str:
    put(d, float("inf"), "weight_scale", "scales")
    return "a scale is inf"


@contents(*NVFP4)
def the_outer_scale_is_zero(d: Path) -> str:
    put(d, 0.0, "weight_scale_2", "weight_global_scale")
    return "an outer scale is 0.0"


@contents(*NVFP4)
def the_outer_scale_is_infinite(d: Path) -> str:
    put(d, float("inf"), "weight_scale_2", "weight_global_scale")
    return "an outer scale is inf"


@contents(*NVFP4)
def the_outer_scale_is_not_a_number(d: Path) -> str:
    put(d, float("nan"), "weight_scale_2", "weight_global_scale")
    return "an outer scale is nan"


@contents(*NVFP4)
def the_outer_scale_is_negative(d: Path) -> str:
    put(d, -2.0, "weight_scale_2", "weight_global_scale")
    return "an outer scale is -2.0"


@contents(*PACKED)
def the_shape_is_another_one(d: Path) -> str:
    put(d, 60.0, "weight_shape")
    return (
        f"{EXPERT}: compressed-tensors pack-quantized: weight_shape is [32, 60], but the model requires [32"
    )
