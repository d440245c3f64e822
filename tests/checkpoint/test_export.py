"""What `export` writes: the reference computes the same on it, and vLLM's loader finds what it looks for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

import dgemma
from adapters import SETTINGS, every_logit, train
from comparison import compare_sequence
from dgemma.checkpoint.adapter_source import DGEMMA_CONFIG, open_adapter
from dgemma.checkpoint.export import plan_export, write_export
from dgemma.checkpoint.fingerprint import file_fingerprint
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.quantized import quantization_config
from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
from dgemma.checkpoint.quantized.reader import read_quantized
from dgemma.checkpoint.quantized.writer import from_checkpoint, write_quantized
from dgemma.checkpoint.safetensors_file import TensorEntry
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint
from dgemma.errors import CheckpointError, InputError
from dgemma.model.config import LayerKind
from oracle import CASES, Case, calm_oracle
from sizes import cases

CASE = CASES[0]
FOREIGN = Path(__file__).parents[1] / "data" / "quantized"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "base"
    calm_oracle(CASE).save_pretrained(path, max_shard_size="100KB")
    (path / "tokenizer.json").write_text('{"carried": "along"}')
    return path


@pytest.fixture(scope="module", params=["int8", "int4", "nvfp4"])
def quantized(base: Path, request: pytest.FixtureRequest) -> Path:
    return quantize(base, base.with_name(request.param), request.param)


@pytest.fixture(scope="module")
def packed(base: Path) -> Path:
    return quantize(base, base.with_name("packed"), "int4")


def quantize(base: Path, out: Path, name: str) -> Path:
    source = open_checkpoint(base)
    write_quantized(out, from_checkpoint(source), quantization_config_for(name, source.config))
    return out


def export(source: Path, out: Path, *, adapter: Path | None = None, to: str = "hf") -> CheckpointSource:
    opened = open_checkpoint(source)
    added = None if adapter is None else open_adapter(adapter, opened.config)
    plan = plan_export(opened, added, to=to)
    seen: list[int] = []
    write_export(out, plan, max_shard_bytes=100_000, on_bytes=seen.append)
    assert sum(seen) == plan.nbytes
    return open_checkpoint(out)


def difference(out: Path, ours: dgemma.LanguageModel, case: Case = CASE) -> float:
    """Between the reference on an exported checkpoint and our model: logits and caches of a short life."""
    theirs, found = DiffusionGemmaForBlockDiffusion.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    return max(compare_sequence(theirs.eval(), ours, case, length=20).values())


def dequantized(path: Path, **more: Any) -> dgemma.LanguageModel:
    return dgemma.load(path, dtype="float32", round_activations=False, **more)


# Transformers


@pytest.mark.parametrize("case", CASES[: cases(99, 4)], ids=lambda case: case.name)
def test_the_reference_computes_the_same_on_a_plain_export(case: Case, tmp_path: Path) -> None:
    calm_oracle(case).save_pretrained(tmp_path / "base")
    export(tmp_path / "base", tmp_path / "out")
    assert difference(tmp_path / "out", dgemma.load(tmp_path / "base"), case) < 1e-4
    assert difference(tmp_path / "out", dgemma.load(tmp_path / "out"), case) < 1e-4


def test_tensors_and_small_files_come_along(base: Path, tmp_path: Path) -> None:
    export(base, tmp_path / "out")
    before = {k: v for file in base.glob("*.safetensors") for k, v in load_file(file).items()}
    after = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"carried": "along"}'
    assert sum("vision" in name for name in after) > 5


@torch.no_grad()
def test_the_reference_computes_the_same_with_a_merged_adapter(base: Path, tmp_path: Path) -> None:
    train(dgemma.load(base).with_adapter(SETTINGS), seed=1).save_adapter(tmp_path / "adapter")
    export(base, tmp_path / "out", adapter=tmp_path / "adapter")
    lm = dgemma.load(base, adapter=tmp_path / "adapter")
    assert difference(tmp_path / "out", lm) < 1e-4
    assert difference(tmp_path / "out", dgemma.load(base)) > 0.01


def test_the_reference_computes_the_same_as_a_quantized_model(quantized: Path, tmp_path: Path) -> None:
    source = export(quantized, tmp_path / "out")
    assert not source.quantized
    assert source.quantized_from is None
    assert difference(tmp_path / "out", dequantized(quantized)) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("trained_on", ["the quantized base", "the plain base"])
def test_an_adapter_is_added_to_dequantized_weights(
    base: Path, quantized: Path, tmp_path: Path, trained_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.checkpoint.export._BLOCK_NUMBERS", 100)  # some rows at a time
    lm = dequantized(quantized) if trained_on == "the quantized base" else dgemma.load(base)
    train(lm.with_adapter(SETTINGS), seed=1).save_adapter(tmp_path / "adapter")
    export(quantized, tmp_path / "out", adapter=tmp_path / "adapter")
    assert difference(tmp_path / "out", dequantized(quantized, adapter=tmp_path / "adapter")) < 1e-4


@pytest.mark.parametrize("block", [100, 1, 1 << 20][: cases(3, 1)])
@pytest.mark.parametrize("name", sorted(path.name for path in FOREIGN.iterdir() if path.is_dir()))
def test_checkpoints_of_other_tools_are_dequantized_and_rounded_once(
    name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.checkpoint.export._BLOCK_NUMBERS", block)
    export(FOREIGN / name, tmp_path / "out")
    source = open_checkpoint(FOREIGN / name)
    theirs, found = DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    # The fixtures have no vision tower.
    assert all(
        key.startswith(("model.encoder.vision", "model.encoder.embed_v")) for key in found["missing_keys"]
    )
    assert not found["unexpected_keys"]
    state = theirs.state_dict()
    assert source.quantized
    for tensor, entry in source.quantized.items():
        assert torch.equal(state[tensor], read_quantized(entry, CPU).dequantize(torch.bfloat16)), tensor


def test_the_dtype_is_that_of_the_other_tensors(packed: Path, base: Path, tmp_path: Path) -> None:
    assert {e.dtype for e in export(packed, tmp_path / "a").entries.values()} == {"F32"}
    dgemma.load(base, dtype="bfloat16").save(tmp_path / "bf16")
    half = quantize(tmp_path / "bf16", tmp_path / "q", "int4")
    found = export(half, tmp_path / "b")
    assert {e.dtype for e in found.entries.values()} == {"BF16"}
    assert found.raw_config["dtype"] == "bfloat16"
    raw = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**raw, "dtype": "float16"}))
    found = export(half, tmp_path / "c")  # dequantized as dgemma reads it: in bfloat16
    assert {e.dtype for e in found.entries.values()} == {"BF16"}
    assert found.raw_config["dtype"] == "bfloat16"


def test_a_quantized_file_has_the_fingerprint_of_the_loaded_model(quantized: Path) -> None:
    lm = dgemma.load(quantized)
    assert file_fingerprint(open_checkpoint(quantized)) == lm.fingerprint()


# Configurations


def test_what_is_missing_in_a_configuration_is_written_out(base: Path, tmp_path: Path) -> None:
    raw = json.loads((base / "config.json").read_text())
    assert "final_logit_softcapping" not in raw["text_config"]  # the reference does not write it
    source = export(base, tmp_path / "out")
    text = source.raw_config["text_config"]
    assert text["final_logit_softcapping"] == 30.0  # without it vLLM caps nothing
    assert text["global_head_dim"] == 16
    assert text["layer_types"][-1] == "full_attention"
    assert source.raw_config["architectures"] == ["DiffusionGemmaForBlockDiffusion"]
    assert source.raw_config["vision_config"] == raw["vision_config"]
    assert source.config == open_checkpoint(base).config


@pytest.mark.parametrize(
    "given", [None, {"t_max": 0.7, "sampler_config": {"entropy_bound": 0.2}, "eos_token_id": [5]}]
)
def test_the_sampler_is_configured_completely(
    given: dict[str, Any] | None, base: Path, tmp_path: Path
) -> None:
    source = open_checkpoint(base)
    (tmp_path / "config").mkdir()
    if given is not None:
        (tmp_path / "config" / "generation_config.json").write_text(json.dumps(given))
    plan = plan_export(replace(source, path=tmp_path / "config"))
    write_export(tmp_path / "out", plan)
    found = DiffusionGemmaGenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.t_min, found.stability_threshold, found.confidence_threshold) == (0.4, 1, 0.005)
    assert (found.t_max, found.sampler_config.entropy_bound) == ((0.8, 0.1) if given is None else (0.7, 0.2))
    assert found.eos_token_id == ([1, 106] if given is None else [5])
    raw = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert "EntropyBound" in raw["sampler_config"]["_cls_name"]  # vLLM asks for it by this name


# Refused


def test_an_adapter_of_another_base_is_refused(base: Path, packed: Path, tmp_path: Path) -> None:
    dgemma.load(base).with_adapter(SETTINGS).save_adapter(tmp_path / "adapter")
    (tmp_path / "adapter" / DGEMMA_CONFIG).write_text('{"base_fingerprint": "another"}')
    for source in (base, packed):
        with pytest.raises(CheckpointError, match="was made for the base another"):
            export(source, tmp_path / "out", adapter=tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


def test_a_taken_directory_is_refused(base: Path, packed: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        export(base, packed)


def test_experts_that_vllm_does_not_read_are_refused_for_it(base: Path, tmp_path: Path) -> None:
    refused = {
        base: "plain weights",
        quantize(base, tmp_path / "int8", "int8"): "compressed-tensors int-quantized",
        quantize(base, tmp_path / "nvfp4", "nvfp4"): "compressed-tensors nvfp4-pack-quantized",
        FOREIGN / "awq-gemm": "awq gemm",
    }
    for path, name in refused.items():
        with pytest.raises(InputError, match=f"are in {name}. `--to hf` writes plain"):
            export(path, tmp_path / "out", to="vllm")


def test_an_adapter_is_not_added_to_weights_that_stay_quantized(packed: Path, tmp_path: Path) -> None:
    dequantized(packed).with_adapter(SETTINGS).save_adapter(tmp_path / "adapter")
    with pytest.raises(InputError, match="an adapter cannot be added into weights that stay quantized"):
        export(packed, tmp_path / "out", adapter=tmp_path / "adapter", to="vllm")


# vLLM, which was never run here: the facts of docs/checkpoint.md about the loader of 0.32.0, as a test.

VLLM_PREFIXES = {
    "model.decoder.self_conditioning.": "self_conditioning.",
    "model.decoder.": "model.",
    "model.encoder.language_model.": "model.",
    "model.encoder.vision_tower.": "vision_tower.",
    "model.encoder.embed_vision.": "embed_vision.",
}
VLLM_JOINED = {
    r"self_attn\.[qkv]_proj\.": "self_attn.qkv_proj.",
    r"mlp\.(gate|up)_proj\.": "mlp.gate_up_proj.",
    r"experts\.gate_up_proj$": "experts.w13_weight",
    r"experts\.down_proj$": "experts.w2_weight",
    r"experts\.\d+\.(gate|up)_proj\.weight_": "experts.w13_weight_",
    r"experts\.\d+\.down_proj\.weight_": "experts.w2_weight_",
}


def vllm_name(name: str) -> str:
    before, after = next((b, a) for b, a in VLLM_PREFIXES.items() if name.startswith(b))
    name = after + name.removeprefix(before)
    if name.startswith("self_conditioning."):  # not joined: a module of its own
        return name
    for pattern, joined in VLLM_JOINED.items():
        name = re.sub(pattern, joined, name)
    return name


def filled(source: CheckpointSource) -> Counter[str]:
    """Parameter of vLLM -> how many numbers of it the files fill."""
    stored: list[TensorEntry] = [*source.entries.values()]
    stored += [e for q in source.quantized.values() for m in q.modules for e in m.entries.values()]
    found = Counter[str]()
    for entry in stored:
        times = 1
        layer = re.search(r"layers\.(\d+)\.self_attn\.k_proj", entry.name)
        if layer and source.config.layers[int(layer[1])].kind is LayerKind.FULL:
            times = 2  # keys are loaded as values too
        found[vllm_name(entry.name)] += times * prod(entry.shape)
    return found


def vllm_parameters(source: CheckpointSource) -> dict[str, int]:
    """What vLLM's model of this geometry has to be given, by name: the numbers of each parameter."""
    c = source.config
    hidden, mlp, experts, width = c.hidden_size, c.mlp_size, c.num_experts, c.expert_size
    found = {"model.embed_tokens.weight": c.vocab_size * hidden, "model.norm.weight": hidden}
    found["self_conditioning.pre_norm.weight"] = hidden
    for name in ("gate_proj", "up_proj", "down_proj"):
        found[f"self_conditioning.{name}.weight"] = hidden * mlp
    for index, layer in enumerate(c.layers):
        queries, keys = c.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        parts = {
            "self_attn.qkv_proj.weight": (queries + 2 * keys) * hidden,
            "self_attn.o_proj.weight": queries * hidden,
            "self_attn.q_norm.weight": layer.head_dim,
            "self_attn.k_norm.weight": layer.head_dim,
            "mlp.gate_up_proj.weight": 2 * mlp * hidden,
            "mlp.down_proj.weight": mlp * hidden,
            "router.proj.weight": experts * hidden,
            "router.scale": hidden,
            "router.per_expert_scale": experts,
            "layer_scalar": 2,  # one number, which the files fill twice
        }
        for name in (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "post_feedforward_layernorm", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
            "pre_feedforward_layernorm_2",
        ):  # fmt: skip
            parts[f"{name}.weight"] = hidden
        if source.quantized:
            per_word, groups = 8, 16  # int4 in int32; the largest group that divides 32 and 16
            for name, out, inner, halves in (("w13", 2 * width, hidden, 2), ("w2", hidden, width, 1)):
                parts[f"experts.{name}_weight_packed"] = experts * out * inner // per_word
                parts[f"experts.{name}_weight_scale"] = experts * out * inner // groups
                parts[f"experts.{name}_weight_shape"] = experts * halves * 2
        else:
            parts["experts.w13_weight"] = experts * 2 * width * hidden
            parts["experts.w2_weight"] = experts * hidden * width
        found |= {f"model.layers.{index}.{name}": size for name, size in parts.items()}
    return found


@pytest.mark.parametrize("case", CASES[: cases(99, 4)], ids=lambda case: case.name)
def test_vllm_finds_each_of_its_parameters_and_no_other(case: Case, tmp_path: Path) -> None:
    calm_oracle(case).save_pretrained(tmp_path / "base")
    source = export(tmp_path / "base", tmp_path / "out")
    assert filled(source) == vllm_parameters(source)
    vision = {vllm_name(entry.name).split(".")[0] for entry in source.kept_aside}
    assert vision == {"vision_tower", "embed_vision"}
    assert not source.tied


def test_vllm_finds_packed_experts_and_plain_weights(packed: Path, tmp_path: Path) -> None:
    """A checkpoint of `quantize` has more: self-conditioning in int8, which vLLM would take for plain."""
    source = export(packed, tmp_path / "out", to="vllm")
    assert filled(source) == vllm_parameters(source)
    assert set(filled(open_checkpoint(packed))) - set(vllm_parameters(source)) >= {
        "model.embed_tokens.weight_scale",
        "self_conditioning.gate_proj.weight_scale",
    }


@torch.no_grad()
def test_with_packed_experts_the_model_is_the_same(packed: Path, tmp_path: Path) -> None:
    source = export(packed, tmp_path / "out", to="vllm")
    parts = {spec.part for spec in tensor_specs(source.config) if spec.name in source.quantized}
    assert parts == {"experts"}
    found, expected = every_logit(dequantized(tmp_path / "out"), CASE), every_logit(dequantized(packed), CASE)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["ct-int4", "ct-int4-asymmetric"])
def test_packed_experts_of_other_tools_are_kept_as_stored(name: str, tmp_path: Path) -> None:
    source, before = export(FOREIGN / name, tmp_path / "out", to="vllm"), open_checkpoint(FOREIGN / name)
    for tensor, entry in source.quantized.items():
        found, expected = read_quantized(entry, CPU), read_quantized(before.quantized[tensor], CPU)
        assert found.parts.keys() == expected.parts.keys()
        assert all(torch.equal(part, expected.parts[key]) for key, part in found.parts.items())


def test_a_whole_row_may_share_a_scale() -> None:
    scheme = quantization_config.CompressedPacked(bits=8, group_len=None)
    written = quantization_config.QuantizationConfig("experts", scheme, others=None).to_json()
    assert quantization_config.schemes_from_config({"quantization_config": written}) == (scheme,)


def test_vllm_matches_the_groups_of_the_configuration(packed: Path, tmp_path: Path) -> None:
    """By regular expressions against its own names, from their beginning."""
    config = export(packed, tmp_path / "out", to="vllm").raw_config["quantization_config"]
    (group,) = config["config_groups"].values()
    (target,) = group["targets"]
    pattern = target.removeprefix("re:")
    assert pattern != target
    assert (group["format"], config["format"]) == ("pack-quantized", "pack-quantized")
    assert group["input_activations"] is None
    for half in ("gate_proj", "up_proj", "down_proj"):
        assert re.match(pattern, f"model.layers.0.experts.0.{half}")
    for other in ("self_attn.qkv_proj", "mlp.gate_up_proj", "router.proj", "experts"):
        assert not re.match(pattern, f"model.layers.0.{other}")
    assert not re.match(pattern, "lm_head")


@pytest.mark.parametrize("case", CASES[: cases(99, 4)], ids=lambda case: case.name)
def test_vllms_configuration_class_has_every_field_that_its_layers_read(case: Case, tmp_path: Path) -> None:
    """Some of its versions have no defaults: a `PreTrainedConfig` with what config.json says."""
    calm_oracle(case).save_pretrained(tmp_path / "base")
    source = export(tmp_path / "base", tmp_path / "out")
    text = PreTrainedConfig(**source.raw_config["text_config"])
    for field in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "hidden_activation", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "attention_bias", "sliding_window", "num_experts", "top_k_experts",
        "moe_intermediate_size", "final_logit_softcapping",
    ):  # fmt: skip
        assert getattr(text, field) is not None, field
    assert text.is_heterogeneous
    for index, shape in enumerate(source.config.layers):
        layer = text.per_layer_config[index]
        assert (layer.head_dim, layer.num_key_value_heads) == (shape.head_dim, shape.num_kv_heads)
        assert text.layer_types[index] == shape.kind.value
        assert text.rope_parameters[shape.kind.value]["rope_theta"] == source.config.rope[shape.kind].theta


def test_layers_with_two_scalars_are_counted(base: Path, tmp_path: Path) -> None:
    plan = plan_export(open_checkpoint(base))
    assert plan.num_layers == plan.num_double_scalars == 3
    dgemma.load(base).save(tmp_path / "equal")
    file = tmp_path / "equal" / "model.safetensors"
    tensors = load_file(file)
    for index in (0, 2):
        one = tensors[f"model.decoder.layers.{index}.layer_scalar"]
        tensors[f"model.encoder.language_model.layers.{index}.layer_scalar"] = one.clone()
    save_file(tensors, file, {"format": "pt"})
    assert plan_export(open_checkpoint(tmp_path / "equal")).num_double_scalars == 1


# Memory

CHILD = """
import resource, sys
from pathlib import Path
from dgemma.checkpoint.export import plan_export, write_export
from dgemma.checkpoint.source import open_checkpoint
small, large, out = map(Path, sys.argv[1:])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
write_export(out / "warm", plan_export(open_checkpoint(small)))
before = peak()
write_export(out / "large", plan_export(open_checkpoint(large)))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_memory_holds_a_weight_and_not_the_model(packed: Path, tmp_path: Path) -> None:
    from dgemma.checkpoint.presets import PRESETS
    from dgemma.checkpoint.quantized.writer import from_random

    tiny = PRESETS["tiny"].config
    config = replace(
        tiny,
        hidden_size=512,
        expert_size=512,
        num_experts=16,
        layers=(tiny.layers[0],) * 4 + tiny.layers[-1:],
    )
    write_quantized(tmp_path / "q", from_random(config, seed=1), quantization_config_for("int8", config))
    command = [sys.executable, "-c", CHILD, str(packed), str(tmp_path / "q"), str(tmp_path)]
    growth = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert size > 60_000_000
    assert growth < 20_000_000, growth  # the largest weight as stored has 4 MB, a block in fp32 has 4 MB
