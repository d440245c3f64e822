"""Write tests/data/quantized: a tiny model as other tools quantize it, and what they make of it again.

Not run in CI: each tool has an environment of its own (MADE_BY.json has the versions). From the repository:

/path/to/its/bin/python -m tools.make_quantized_fixtures llmcompressor    (or modelopt, or autoawq)

A fixture is a whole checkpoint as the tool writes it, and beside it
  expected.safetensors  every quantized linear as the tool itself decodes it, computed in fp32
  MADE_BY.json          the tool, and digests of the same linears in the type the tool runs in
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig
from transformers.models.gemma4 import Gemma4VisionConfig

OUT = Path(__file__).parent.parent / "tests" / "data" / "quantized"
PACKAGES = {"llmcompressor": "llmcompressor", "modelopt": "nvidia-modelopt", "autoawq": "autoawq"}
GROUP = 16
# What the published recipes leave as it is.
LEFT = ["lm_head", *(f"re:.*{name}.*" for name in ("embed", "router", "vision", "norm", "self_conditioning"))]
ONLY_EXPERTS = [*LEFT, "re:.*self_attn.*", "re:.*layers\\.\\d+\\.mlp.*"]

Tensors = dict[str, Tensor]
Decode = Callable[[Tensors, torch.dtype], Tensor]
"""The parts of one linear -> its numbers, computed and returned in a type."""


@torch.no_grad()
def make_model() -> DiffusionGemmaForBlockDiffusion:
    """The same numbers in every environment: a tensor's are seeded by its name."""
    text = DiffusionGemmaTextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, sliding_window=8,
        num_experts=4, top_k_experts=2, moe_intermediate_size=32, max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, position_embedding_size=4, patch_size=2,
    )  # fmt: skip
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=8)
    config.architectures = ["DiffusionGemmaForBlockDiffusion"]
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name or "embed_scale" in name:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if tensor.ndim < 2:
            low, high = (0.15, 0.45) if name.endswith("q_norm.weight") else (0.7, 1.3)
            tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            _strain(tensor)
    return model.bfloat16()


def _strain(bank: Tensor) -> None:
    """What a scale must survive: zeros, numbers that dwarf their neighbours, tiny ones, all of one sign."""
    bank[0, 0] = 0
    bank[0, 1, :GROUP] = 0
    bank[0, 2, 3] = 40
    bank[0, 3, :GROUP] *= 1e-4
    bank[1, 0, :GROUP] = bank[1, 0, :GROUP].abs() + 1
    bank[1, 1, :GROUP] = -bank[1, 1, :GROUP].abs() - 1
    bank[2, 0, :GROUP] = torch.arange(GROUP) * 0.25 - 2  # ties between codes


def write_fixture(
    name: str,
    made: Path,
    tensors: Tensors,
    linears: Mapping[str, Decode],
    own: torch.dtype,
    tool: str,
    what: str,
) -> None:
    """Write a checkpoint's `tensors`, its JSON files from `made`, and the tool's answers to it.

    what: which of the tool's functions made it.
    """
    target = OUT / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in ("config.json", "hf_quant_config.json"):
        if (made / file).exists():
            shutil.copyfile(made / file, target / file)
    save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    expected, digests = {}, {}
    for module, decode in linears.items():
        parts = {n.removeprefix(module + "."): t for n, t in tensors.items() if n.startswith(module + ".")}
        expected[module] = decode(parts, torch.float32).contiguous()
        assert expected[module].dtype == torch.float32
        digests[module] = digest(decode(parts, own))
    save_file(expected, target / "expected.safetensors", {"format": "pt"})
    made_by = {
        "tool": PACKAGES[tool],
        "version": version(PACKAGES[tool]),
        "functions": what,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "command": f"python -m tools.make_quantized_fixtures {tool}",
        "own_dtype": str(own).removeprefix("torch."),
        "own_sha256": digests,
    }
    (target / "MADE_BY.json").write_text(json.dumps(made_by, indent=1) + "\n")
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{name}: {len(expected)} linears, {size} bytes")


def digest(numbers: Tensor) -> str:
    # A zero has no sign: ModelOpt reads the code of the negative one as 0.
    positive = numbers.cpu() + torch.zeros((), dtype=numbers.dtype)
    return hashlib.sha256(positive.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# --- compressed-tensors, by way of llm-compressor


def with_llmcompressor() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme

    def weights(**args: Any) -> QuantizationScheme:
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))

    def group(**args: Any) -> QuantizationScheme:
        return weights(num_bits=4, type="int", strategy="group", group_size=GROUP, **args)

    def preset(name: str) -> QuantizationScheme:
        return preset_name_to_scheme(name, ["Linear"])

    blocks = preset("FP8_BLOCK")
    # Smaller than its 128 x 128, and like these no divisor of the rows.
    blocks.weights.block_structure = [24, 48]
    blocks.input_activations.group_size = 48
    mixed = {
        "experts": group(symmetric=True),
        "mlp": weights(num_bits=8, type="int", strategy="channel", symmetric=True),
        "attention": group(symmetric=False),
        "global": preset("FP8_DYNAMIC"),
    }
    mixed["experts"].targets = ["re:.*experts.*"]
    mixed["mlp"].targets = ["re:.*layers\\.\\d+\\.mlp.*"]
    mixed["attention"].targets = ["re:.*layers\\.0\\.self_attn.*"]
    mixed["global"].targets = ["re:.*layers\\.1\\.self_attn.*"]
    _llmcompressor("ct-fp8-channel", {"FP8_DYNAMIC": preset("FP8_DYNAMIC")}, LEFT)
    _llmcompressor("ct-fp8-block", {"FP8_BLOCK": blocks}, ONLY_EXPERTS)
    _llmcompressor("ct-int8", {"INT8": preset("INT8")}, LEFT)
    _llmcompressor("ct-int4", {"group_0": group(symmetric=True)}, ONLY_EXPERTS)
    _llmcompressor("ct-int4-asymmetric", {"group_0": group(symmetric=False)}, ONLY_EXPERTS)
    _llmcompressor("ct-nvfp4", {"NVFP4": preset("NVFP4")}, ONLY_EXPERTS)
    _llmcompressor("ct-mixed", mixed, LEFT)


def _llmcompressor(name: str, groups: dict[str, Any], ignore: list[str]) -> None:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
    from llmcompressor.entrypoints.model_free.save_utils import update_config

    status = QuantizationStatus.INITIALIZED
    config = QuantizationConfig(config_groups=groups, quantization_status=status, ignore=ignore)
    for scheme in groups.values():
        scheme.weights.observer = "static_minmax"
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        make_model().save_pretrained(made)
        # What `model_free_ptq` does to a file. Itself it refuses NVFP4 for a model without some v_proj, and
        # cannot save blocks that end outside their matrix.
        tensors = ModelFreePtqConverter(config).process(load_file(made / "model.safetensors"))
        update_config(made, config)
        linears: dict[str, Decode] = {}
        for module, scheme in _compressed_modules(tensors, config):
            linears[module] = _compressed_decode(scheme)
            if f"{module}.input_global_scale" in tensors:  # a calibration would have set it
                tensors[f"{module}.input_global_scale"].fill_(2.5)
        what = f"ModelFreePtqConverter.process; compressed-tensors {version('compressed-tensors')} decompress"
        write_fixture(name, made, tensors, linears, torch.bfloat16, "llmcompressor", what)


def _compressed_modules(tensors: Tensors, config: Any) -> Iterator[tuple[str, Any]]:
    from compressed_tensors.utils import match_quantizable_tensors

    original = {n.replace(".weight_packed", ".weight"): t for n, t in tensors.items()}
    for scheme in config.config_groups.values():
        for module, _ in match_quantizable_tensors(original, config.ignore, scheme.targets):
            if f"{module}.weight_scale" in tensors:
                yield module, scheme


def _compressed_decode(scheme: Any) -> Decode:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    def decode(parts: Tensors, dtype: torch.dtype) -> Tensor:
        if "weight_global_scale" in parts and dtype == torch.float32:  # its `decompress` knows bf16 only
            packed = parts["weight_packed"]
            codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype)
            scale, outer = parts["weight_scale"].to(dtype), parts["weight_global_scale"]
            found = dequantize(codes, scale, args=scheme.weights, global_scale=outer, dtype=dtype)
        else:
            if "weight_global_scale" not in parts:
                parts = {**parts, "weight_scale": parts["weight_scale"].to(dtype)}
            compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
            found = compressor.decompress(parts, scheme)["weight"]
        assert found.dtype == dtype
        return found

    return decode


# --- ModelOpt


def with_modelopt() -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def calibrate(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(64, (8, 24), generator=generator)
        model(input_ids=prompt, decoder_input_ids=torch.randint(64, (8, 8), generator=generator))

    def decode(parts: Tensors, dtype: torch.dtype) -> Tensor:
        packed = parts["weight"]
        held = NVFP4QTensor((packed.shape[0], packed.shape[1] * 2), dtype, packed)
        scales = {"scale": parts["weight_scale"], "double_scale": parts["weight_scale_2"]}
        found: Tensor = held.dequantize(dtype, **scales, block_sizes={-1: 16})
        return found

    # Attention plain, the context in eight bits: as its own recipe for this family has it.
    context = mtq.FP8_KV_CFG["quant_cfg"]
    recipe = mtq.utils.update_quant_cfg_with_kv_cache_quant(mtq.NVFP4_MLP_ONLY_CFG, context)
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        made = Path(directory)
        model = mtq.quantize(make_model(), recipe, calibrate)
        export_hf_checkpoint(model, export_dir=made)
        tensors = load_file(made / "model.safetensors")
        outer = ".weight_scale_2"
        linears = {name.removesuffix(outer): decode for name in sorted(tensors) if name.endswith(outer)}
        what = "mtq.quantize, export_hf_checkpoint; NVFP4QTensor.dequantize"
        write_fixture("modelopt-nvfp4", made, tensors, linears, torch.bfloat16, "modelopt", what)


# --- AWQ


def with_autoawq() -> None:
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    quantizer = AwqQuantizer.__new__(AwqQuantizer)  # whose rounding is a method; the rest needs a known model
    quantizer.group_size, quantizer.w_bit, quantizer.zero_point = GROUP, 4, True

    def decode(parts: Tensors, dtype: torch.dtype) -> Tensor:
        scales = parts["scales"].to(dtype)
        found: Tensor = dequantize_gemm(parts["qweight"], parts["qzeros"], scales, 4, GROUP)
        return found.t()

    tensors: Tensors = {}
    linears: dict[str, Decode] = {}
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        made = Path(directory)
        make_model().save_pretrained(made)
        for name, tensor in load_file(made / "model.safetensors").items():
            if ".experts." not in name:
                tensors[name] = tensor
                continue
            for module, matrix in _taken_apart(name, tensor):
                linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
                linear.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(matrix.float())
                scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
                packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales, zeros=zeros)
                tensors |= {f"{module}.{part}": t for part, t in packed.state_dict().items()}
                linears[module] = decode
        raw = json.loads((made / "config.json").read_text())
        raw["quantization_config"] = AwqConfig(q_group_size=GROUP).to_transformers_dict()
        (made / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        what = "AwqQuantizer.pseudo_quantize_tensor, WQLinear_GEMM.from_linear; dequantize_gemm"
        write_fixture("awq-gemm", made, tensors, linears, torch.float16, "autoawq", what)


def _taken_apart(name: str, bank: Tensor) -> Iterator[tuple[str, Tensor]]:
    experts, _, leaf = name.rpartition(".")
    for number, matrix in enumerate(bank):
        if leaf == "down_proj":
            yield f"{experts}.{number}.down_proj", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{experts}.{number}.gate_proj", gate
            yield f"{experts}.{number}.up_proj", up


def main() -> None:
    makers = {"llmcompressor": with_llmcompressor, "modelopt": with_modelopt, "autoawq": with_autoawq}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=makers)
    makers[parser.parse_args().tool]()


if __name__ == "__main__":
    main()
