"""A quantized checkpoint we cannot read is refused by name: by its recipe, its headers, or its numbers."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from broken_checkpoints import Break
from checkpoint.quantized.broken_files import CONTENTS, HEADERS
from checkpoint.quantized.broken_recipes import RECIPES
from checkpoint.quantized.quantized_files import CPU, NAMES, copy_of, recipe_of
from dgemma.checkpoint.load import load_transformer
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.presets import PRESETS, layers
from dgemma.checkpoint.quantized.quantization_config import schemes_from_config
from dgemma.checkpoint.quantized.schemes import CompressedPacked, ModelOptNvfp4, QuantizationScheme
from dgemma.checkpoint.quantized.tensor_index import module_names, take_quantized
from dgemma.checkpoint.safetensors_file import TensorEntry, TensorToWrite, header_of
from dgemma.checkpoint.source import open_checkpoint
from dgemma.errors import CheckpointError, ConfigError


def named(case: object) -> str:
    return case if isinstance(case, str) else getattr(case, "__name__", repr(case))


@pytest.mark.parametrize(("fixture", "break_it"), RECIPES, ids=named)
def test_a_recipe_we_cannot_follow_is_refused_by_name(
    fixture: str, break_it: Callable[[dict[str, Any]], str]
) -> None:
    recipe = copy.deepcopy(recipe_of(fixture))
    assert schemes_from_config({"quantization_config": recipe})
    message = break_it(recipe)
    with pytest.raises(ConfigError) as caught:
        schemes_from_config({"quantization_config": recipe})
    assert message in str(caught.value), str(caught.value)


@pytest.mark.parametrize(("fixture", "break_it"), HEADERS, ids=named)
def test_headers_that_contradict_the_recipe_are_refused_before_anything_is_read(
    fixture: str, break_it: Break, tmp_path: Path
) -> None:
    directory = copy_of(fixture, tmp_path / "model")
    message = break_it(directory)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert message in str(caught.value), str(caught.value)


@pytest.mark.parametrize(("fixture", "break_it"), CONTENTS, ids=named)
def test_numbers_no_scale_can_be_are_refused_with_their_module(
    fixture: str, break_it: Break, tmp_path: Path
) -> None:
    directory = copy_of(fixture, tmp_path / "model")
    message = break_it(directory)
    source = open_checkpoint(directory)
    with pytest.raises(CheckpointError) as caught:
        load_transformer(source, dtype=torch.float32, device=CPU)
    assert message in str(caught.value), str(caught.value)
    assert str(caught.value).startswith("model.decoder.layers.0.experts.")


def test_every_fixture_is_broken_in_some_way_of_each_kind() -> None:
    for cases in (RECIPES, HEADERS, CONTENTS):
        assert {fixture for fixture, _ in cases} <= set(NAMES)
    assert {fixture for fixture, _ in CONTENTS} >= {"modelopt-nvfp4", "awq-gemm", "ct-fp8-channel", "ct-int4"}


def test_a_refusal_of_a_recipe_names_the_directory(tmp_path: Path) -> None:
    directory = copy_of("ct-nvfp4", tmp_path / "model")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": ["nvfp4"]}))
    with pytest.raises(ConfigError, match=r"model: quantization_config is a list; it must be an object"):
        open_checkpoint(directory)


def test_no_recipe_means_no_formats() -> None:
    assert schemes_from_config({}) == schemes_from_config({"quantization_config": None}) == ()


def test_a_recipe_nested_too_deeply_to_be_shown_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for recipe in ({"quant_method": deep}, {"quant_method": "modelopt", "quant_algo": deep}):
        with pytest.raises(ConfigError, match="nested too deeply"):
            schemes_from_config({"quantization_config": recipe})


def test_another_group_size_in_hf_quant_config_is_refused() -> None:
    recipe = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 32}}
    with pytest.raises(ConfigError, match="modelopt: group_size is 32; NVFP4 has 16"):
        schemes_from_config({"quantization_config": recipe})


def test_rows_of_an_odd_length_do_not_fit_into_bytes_of_two_codes() -> None:
    spec = TensorSpec(
        "model.decoder.layers.0.mlp.up_proj.weight", "layers.0.mlp.up.weight", (4, 7), "shared_mlp"
    )
    module = spec.name.removesuffix(".weight")
    quantized = {"weight_packed": ("I32", (4, 1)), "weight_scale": ("BF16", (4, 1))}
    found = {
        f"{module}.{part}": TensorEntry(f"{module}.{part}", dtype, shape, Path("model.safetensors"), 0, 16)
        for part, (dtype, shape) in quantized.items()
    }
    with pytest.raises(CheckpointError, match="has rows of 7, which are not whole groups of 2"):
        take_quantized(spec, found, (CompressedPacked(bits=4, group_len=None),), [])


def test_groups_of_modules_with_the_same_recipe_are_one_format() -> None:
    recipe = recipe_of("ct-int4")
    (group,) = recipe["config_groups"].values()
    twice = {**recipe, "config_groups": {"group_0": group, "group_1": {**group, "targets": ["Embedding"]}}}
    assert len(schemes_from_config({"quantization_config": twice})) == 1


def test_a_wrong_group_size_in_a_model_of_full_width_is_refused_in_little_memory(tmp_path: Path) -> None:
    """Of one layer of the released geometry only headers are read; its file is a hole of 1.8 GB."""
    config = replace(
        PRESETS["26b"].config,
        layers=layers(1, head_dim=256, kv_heads=8, full_head_dim=512, full_kv_heads=2),
    )
    scheme = ModelOptNvfp4()
    tensors = []
    for spec in tensor_specs(config):
        if spec.part != "experts":
            tensors.append(TensorToWrite(spec.name, "BF16", spec.shape, list))
            continue
        modules = next(module_names(spec))
        out, inner = spec.size // spec.shape[-1] // len(modules), spec.shape[-1]
        for module in modules:
            for name, part in scheme.parts(out, inner).items():
                shape = (out, inner // 32) if name == "weight_scale" else part.shapes[0]
                tensors.append(TensorToWrite(f"{module}.{name}", part.dtypes[0], shape, list))
    recipe = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps({**config.to_json(), "quantization_config": recipe}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(header_of(tensors))
        file.truncate(file.tell() + sum(tensor.nbytes for tensor in tensors))
    tracemalloc.start()
    try:
        with pytest.raises(
            CheckpointError, match=r"has shape \[704, 88\]; config.json requires \[704, 176\]."
        ):
            open_checkpoint(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


# Words that mean something, so that random recipes get past the first question.
WORDS = st.sampled_from(
    ["compressed-tensors", "modelopt", "awq", "pack-quantized", "nvfp4-pack-quantized", "int-quantized",
     "float-quantized", "naive-quantized", "NVFP4", "gemm", "int", "float", "group", "channel", "tensor",
     "block", "tensor_group", "static", "weight", "mixed-precision", "dense", ""]
)  # fmt: skip
NUMBERS = st.integers() | st.sampled_from([4, 8, 16, 32, 128]) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS | st.text()


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)


def with_some(*names: str, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields; `names` hold anything."""
    return st.fixed_dictionaries({}, optional={**dict.fromkeys(names, ANYTHING), **known})


ANYTHING = st.recursive(SCALARS, nested)
WEIGHTS = with_some(
    "num_bits", "type", "strategy", "group_size", "symmetric", "dynamic",
    actorder=st.none() | ANYTHING, block_structure=ANYTHING | st.lists(st.integers(), max_size=3),
)  # fmt: skip
GROUPS = st.dictionaries(
    st.text(max_size=8), ANYTHING | with_some(weights=ANYTHING | WEIGHTS, format=WORDS | ANYTHING), max_size=3
)
RANDOM_RECIPES = ANYTHING | with_some(
    "quant_algo", "group_size", "bits", "version", "zero_point",
    quant_method=st.sampled_from(["compressed-tensors", "modelopt", "awq"]) | ANYTHING,
    config_groups=ANYTHING | GROUPS,
    format=WORDS | ANYTHING,
    sparsity_config=st.none() | ANYTHING,
    quantization=ANYTHING | with_some("quant_algo", "group_size"),
)  # fmt: skip


@given(RANDOM_RECIPES)
def test_any_recipe_is_read_or_refused_and_never_falls_over(recipe: object) -> None:
    try:
        found = schemes_from_config({"quantization_config": recipe})
    except ConfigError:
        return
    assert bool(found) == (recipe is not None)
    for scheme in found:
        assert isinstance(scheme, QuantizationScheme)
        assert scheme.main in scheme.parts(32, 64)


TOOL_RECIPES = st.sampled_from(NAMES).map(recipe_of)


@given(TOOL_RECIPES, st.data())
def test_a_tools_recipe_with_one_field_changed_is_read_or_refused(
    recipe: dict[str, Any], data: st.DataObject
) -> None:
    changed = copy.deepcopy(recipe)
    at: Any = changed
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else list(range(len(at)))))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(ANYTHING)
        break
    try:
        found = schemes_from_config({"quantization_config": changed})
    except ConfigError:
        return
    assert found
