"""Ways to break a recipe. Each changes a tool's `quantization_config` and returns what the error must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint.quantized.quantized_files import weights_of

Recipe = dict[str, Any]
Break = Callable[[Recipe], str]
RECIPES: list[tuple[str, Break]] = []  # (the fixture whose recipe it breaks, the break)

ANY = "ct-nvfp4"
PACKED = ("ct-int4", "ct-int4-asymmetric")
EIGHT_BITS = ("ct-fp8-channel", "ct-int8")
COMPRESSED = ("ct-nvfp4", "ct-fp8-channel", "ct-fp8-block", "ct-int8", *PACKED)


def recipe(*fixtures: str) -> Callable[[Break], Break]:
    def add(function: Break) -> Break:
        RECIPES.extend((fixture, function) for fixture in fixtures)
        return function

    return add


@recipe(ANY)
def unknown_method(r: Recipe) -> str:
    r["quant_method"] = "gptq"
    return "quant_method is 'gptq'"


@recipe(ANY)
def misspelt_method(r: Recipe) -> str:
    r["quant_method"] = "compressed_tensors"
    return "did you mean 'compressed-tensors'?"


@recipe(ANY)
def no_method(r: Recipe) -> str:
    del r["quant_method"]
    return "quant_method is None"


@recipe(*COMPRESSED)
def unknown_format(r: Recipe) -> str:
    for group in r["config_groups"].values():
        group["format"] = "marlin-24"
    return "format is 'marlin-24'"


@recipe(ANY)
def format_of_a_list(r: Recipe) -> str:
    r["format"] = ["pack-quantized"]
    for group in r["config_groups"].values():
        group["format"] = None
    return "format is ['pack-quantized']"


@recipe(ANY)
def no_groups(r: Recipe) -> str:
    r["config_groups"] = {}
    return "config_groups must name 1 to 64"


@recipe(ANY)
def groups_of_text(r: Recipe) -> str:
    r["config_groups"] = "all"
    return "config_groups must name 1 to 64"


@recipe(ANY)
def too_many_groups(r: Recipe) -> str:
    (group,) = r["config_groups"].values()
    r["config_groups"] = {f"group_{number}": group for number in range(65)}
    return "config_groups must name 1 to 64"


@recipe(*COMPRESSED)
def weights_left_plain(r: Recipe) -> str:
    name, group = next(iter(r["config_groups"].items()))
    group["weights"] = None
    return f"{name} has no entry for weights"


@recipe(ANY)
def sparse_weights(r: Recipe) -> str:
    r["sparsity_config"] = {"format": "sparse-24-bitmask"}
    return "sparsity_config is not supported"


@recipe(ANY)
def rotated_weights(r: Recipe) -> str:
    r["transform_config"] = {"config_groups": {"R1": {"type": "hadamard"}}}
    return "transform_config is not supported"


@recipe(*PACKED)
def reordered_columns(r: Recipe) -> str:
    weights_of(r)["actorder"] = "group"
    return "actorder is 'group'"


@recipe(*PACKED)
def three_bits(r: Recipe) -> str:
    weights_of(r)["num_bits"] = 3
    return "num_bits is 3; dgemma reads 4 or 8"


@recipe("ct-nvfp4")
def eight_bit_nvfp4(r: Recipe) -> str:
    weights_of(r)["num_bits"] = 8
    return "num_bits is 8; dgemma reads 4"


@recipe(*EIGHT_BITS)
def four_bits_unpacked(r: Recipe) -> str:
    weights_of(r)["num_bits"] = 4
    return "num_bits is 4; dgemma reads 8"


@recipe("ct-int8")
def bits_of_another_type(r: Recipe) -> str:
    weights_of(r)["num_bits"] = 8.0
    return "num_bits is 8.0"


@recipe("ct-nvfp4")
def mxfp4_groups(r: Recipe) -> str:
    weights_of(r)["group_size"] = 32
    return "group_size is 32; dgemma reads 16"


@recipe(*PACKED)
def group_of_no_length(r: Recipe) -> str:
    weights_of(r)["group_size"] = None
    return "group_size is None"


@recipe(*PACKED)
def group_of_minus_one(r: Recipe) -> str:
    weights_of(r)["group_size"] = -1
    return "group_size is -1"


@recipe(*PACKED)
def odd_groups(r: Recipe) -> str:
    weights_of(r)["group_size"] = 31
    return "group_size is 31; it must be an even number"


@recipe("ct-int8")
def a_zero_point_of_eight_bits(r: Recipe) -> str:
    weights_of(r)["symmetric"] = False
    return "symmetric is False; dgemma reads True"


@recipe("ct-int4")
def a_symmetry_of_text(r: Recipe) -> str:
    weights_of(r)["symmetric"] = "false"
    return "symmetric is 'false'; dgemma reads True or False"


@recipe("ct-int4-asymmetric")
def a_zero_point_of_eight_packed_bits(r: Recipe) -> str:
    weights_of(r)["num_bits"] = 8
    return "num_bits is 8; dgemma reads 4"


@recipe(*PACKED)
def floats_packed(r: Recipe) -> str:
    weights_of(r)["type"] = "float"
    return "type is 'float'; dgemma reads 'int'"


@recipe("ct-int8")
def floats_called_integers(r: Recipe) -> str:
    weights_of(r)["type"] = "float"
    return "type is 'float'; dgemma reads 'int'"


@recipe(*EIGHT_BITS)
def eight_bits_in_groups(r: Recipe) -> str:
    weights_of(r)["strategy"] = "group"
    return "strategy is 'group'; dgemma reads 'tensor' or 'channel' or 'block'"


@recipe("ct-fp8-block")
def block_of_one_size(r: Recipe) -> str:
    weights_of(r)["block_structure"] = [128]
    return "block_structure is [128]; it must be two sizes"


@recipe("ct-fp8-block")
def block_of_nothing(r: Recipe) -> str:
    weights_of(r)["block_structure"] = [0, 128]
    return "block_structure is [0, 128]"


@recipe("modelopt-nvfp4")
def another_algorithm(r: Recipe) -> str:
    r["quant_algo"] = "W4A8_AWQ"
    return "modelopt: quant_algo is 'W4A8_AWQ'; dgemma reads 'NVFP4'"


@recipe("modelopt-nvfp4")
def no_algorithm(r: Recipe) -> str:
    r.pop("quant_algo", None)
    r.pop("quantization", None)
    return "modelopt: quant_algo is None"


@recipe("modelopt-nvfp4")
def nvfp4_in_groups_of_32(r: Recipe) -> str:
    r["group_size"] = 32
    return "modelopt: group_size is 32; NVFP4 has 16"


@recipe("awq-gemm")
def awq_of_three_bits(r: Recipe) -> str:
    r["bits"] = 3
    return "awq: bits is 3; dgemma reads 4"


@recipe("awq-gemm")
def awq_for_another_kernel(r: Recipe) -> str:
    r["version"] = "gemv"
    return "awq: version is 'gemv'"


@recipe("awq-gemm")
def awq_without_zeros(r: Recipe) -> str:
    r["zero_point"] = False
    return "awq: zero_point is False"


@recipe("awq-gemm")
def awq_of_whole_rows(r: Recipe) -> str:
    r["group_size"] = -1
    return "awq: group_size is -1"
