"""Export a checkpoint as one GGUF file: matrices in Q8_0, F16 or BF16, routers and vectors in F32.

Names and metadata are those of `gguf_names.py`, which are provisional. The file holds tokenizer.json, the
chat template and generation_config.json as they are. llama.cpp keeps vision towers in another file; they are
left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.adapter_source import AdapterSource
from dgemma.checkpoint.export import plan_export, rows_in_float32
from dgemma.checkpoint.gguf_names import (
    ARCHITECTURE,
    CANVAS_LENGTH,
    CHAT_TEMPLATE,
    NOT_ROTATED,
    ROPE_FREQUENCIES,
    SAMPLER_KEYS,
    TOKENIZER_JSON,
    gguf_name,
)
from dgemma.checkpoint.gguf_source import GENERATION_CONFIG
from dgemma.checkpoint.gguf_writer import GgufTensorToWrite, write_gguf_file
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.safetensors_file import TensorToWrite
from dgemma.checkpoint.source import CheckpointSource
from dgemma.errors import CheckpointError, InputError
from dgemma.gguf_file import is_gguf
from dgemma.model.config import LayerKind, ModelConfig

FORMATS = {"q8_0": ("Q8_0", 7), "f16": ("F16", 1), "bf16": ("BF16", 32)}
"""By name of the command: the type of matrices, and llama.cpp's number for such a file."""
_Q8_0_BLOCK = 32
_WHOLE_OPTIONS = ("max_denoising_steps", "stability_threshold")
_TEXT_FILES = {"chat_template.jinja": CHAT_TEMPLATE, "tokenizer.json": TOKENIZER_JSON}
# Types of tokens in GGUF.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6


@dataclass(frozen=True, kw_only=True)
class GgufExport:
    """What is to be written."""

    metadata: dict[str, Any]
    tensors: list[GgufTensorToWrite]
    num_left_out: int  # tensors of the vision tower

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def refuse_taken_file(path: Path) -> None:
    if not is_gguf(path):
        raise InputError.about("out", f"is {str(path)!r}; a GGUF file has a name that ends in .gguf.")
    if path.exists():
        raise InputError.about("out", f"is {str(path)!r}, which exists; choose another name, or remove it.")


def plan_gguf(source: CheckpointSource, adapter: AdapterSource | None = None, *, name: str) -> GgufExport:
    """The export of `source`, with `adapter` added in. name: of FORMATS."""
    kind, number = FORMATS[name]
    plain = plan_export(source, adapter)
    metadata = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": source.path.stem,
        "general.file_type": number,
        "general.quantization_version": 2,
        **_geometry(source.config),
        **_generation(plain.generation_config),
        **_text(plain.companions, source.config.vocab_size),
    }
    by_name = {tensor.name: tensor for tensor in plain.tensors}
    tensors = [_tensor(spec, by_name[spec.name], kind) for spec in tensor_specs(source.config)]
    frequencies = _frequencies(source.config)
    if frequencies is not None:
        chunks = partial(iter, [frequencies.numpy().tobytes()])
        tensors.append(GgufTensorToWrite(ROPE_FREQUENCIES, "F32", tuple(frequencies.shape), chunks))
    return GgufExport(metadata=metadata, tensors=tensors, num_left_out=len(source.kept_aside))


def write_gguf(path: Path, export: GgufExport, on_bytes: Callable[[int], None] | None = None) -> None:
    """Write a file that is not there yet."""
    refuse_taken_file(path)
    write_gguf_file(path, export.metadata, export.tensors, on_bytes)


def _tensor(spec: TensorSpec, tensor: TensorToWrite, kind: str) -> GgufTensorToWrite:
    if len(spec.shape) < 2 or spec.part == "router":
        kind = "F32"
    elif kind == "Q8_0" and spec.shape[-1] % _Q8_0_BLOCK:
        kind = "BF16"
    encode = {"F32": _as_float32, "F16": _as_float16, "BF16": _as_bfloat16, "Q8_0": to_q8_0}[kind]

    def chunks() -> Iterator[Any]:
        for rows in rows_in_float32(tensor):
            stored = encode(rows)
            if kind == "F16" and not stored.isfinite().all():
                raise CheckpointError(f"{spec.name!r} holds numbers that F16 has not; take bf16 or q8_0.")
            yield stored.contiguous().view(-1).view(torch.uint8).numpy()

    return GgufTensorToWrite(gguf_name(spec.name), kind, spec.shape, chunks)


def _as_float32(rows: Tensor) -> Tensor:
    return rows


def _as_float16(rows: Tensor) -> Tensor:
    return rows.half()


def _as_bfloat16(rows: Tensor) -> Tensor:
    return rows.bfloat16()


def to_q8_0(rows: Tensor) -> Tensor:
    """Blocks of 32 int8 numbers behind an fp16 scale, to the bit as ggml makes them: [rows, bytes]."""
    blocks = rows.unflatten(-1, (-1, _Q8_0_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # Tensors, not numbers, which torch would multiply by a rounded reciprocal.
    scale = largest / torch.full_like(largest, 127.0)
    inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, torch.zeros_like(scale))
    exact = blocks * inverse
    size = exact.abs()
    whole = size.floor()
    rounded = exact.sign() * (whole + (2 * (size - whole)).floor())  # halves away from zero
    values = rounded.to(torch.int8).view(torch.uint8)
    return torch.cat((scale.half().view(torch.uint8), values), -1).flatten(-2)


def _geometry(config: ModelConfig) -> dict[str, Any]:
    head_dims = {shape.kind: shape.head_dim for shape in config.layers}
    full = head_dims[LayerKind.FULL]
    sliding = head_dims.get(LayerKind.SLIDING, full)
    sliding_rope = config.rope.get(LayerKind.SLIDING)
    if sliding_rope is not None and sliding_rope.rotated_share != 1:
        raise CheckpointError(
            f"a share of {sliding_rope.rotated_share} of the sliding layers' heads rotates; GGUF files of "
            "this architecture rotate them whole."
        )
    a = ARCHITECTURE
    return {
        f"{a}.block_count": len(config.layers),
        f"{a}.context_length": config.max_positions,
        f"{a}.embedding_length": config.hidden_size,
        f"{a}.feed_forward_length": config.mlp_size,
        f"{a}.expert_feed_forward_length": config.expert_size,
        f"{a}.expert_count": config.num_experts,
        f"{a}.expert_used_count": config.experts_per_token,
        f"{a}.attention.head_count": config.num_heads,
        f"{a}.attention.head_count_kv": [shape.num_kv_heads for shape in config.layers],
        f"{a}.attention.key_length": full,
        f"{a}.attention.value_length": full,
        f"{a}.attention.key_length_swa": sliding,
        f"{a}.attention.value_length_swa": sliding,
        f"{a}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{a}.attention.sliding_window": config.window,
        f"{a}.attention.sliding_window_pattern": [s.kind is LayerKind.SLIDING for s in config.layers],
        f"{a}.attention.shared_kv_layers": 0,
        f"{a}.attention.causal": False,
        f"{a}.embedding_length_per_layer_input": 0,
        f"{a}.rope.dimension_count": full,
        f"{a}.rope.dimension_count_swa": sliding,
        f"{a}.rope.freq_base": float(config.rope[LayerKind.FULL].theta),
        f"{a}.rope.freq_base_swa": float(sliding_rope.theta if sliding_rope else 10_000.0),
        f"{a}.final_logit_softcapping": float(config.logit_cap),
        f"{a}.vocab_size": config.vocab_size,
        CANVAS_LENGTH: config.canvas_len,
    }


def _frequencies(config: ModelConfig) -> Tensor | None:
    """The divisors of the full layers' frequencies; None if the heads rotate whole."""
    head_dim = config.head_dim(LayerKind.FULL)
    rotated = int(config.rope[LayerKind.FULL].rotated_share * head_dim / 2)
    if 2 * rotated == head_dim:
        return None
    divisors = torch.full((head_dim // 2,), NOT_ROTATED)
    divisors[:rotated] = 1
    return divisors


def _generation(raw: dict[str, Any]) -> dict[str, Any]:
    sampler = raw.get("sampler_config")
    known = {**raw, **(sampler if isinstance(sampler, dict) else {})}
    found: dict[str, Any] = {
        # A reader of GGUF takes 1 for a whole number and refuses it where it expects 1.0.
        key: known[name] if name in _WHOLE_OPTIONS else float(known[name])
        for name, key in SAMPLER_KEYS.items()
        if type(known.get(name)) in (int, float)
    }
    ends = raw.get("eos_token_id")
    for name, end in zip(("eos", "eot"), ends if isinstance(ends, list) else [ends], strict=False):
        if type(end) is int:
            found[f"tokenizer.ggml.{name}_token_id"] = end
    return {**found, GENERATION_CONFIG: json.dumps(raw)}


def _text(companions: list[Any], vocab_size: int) -> dict[str, Any]:
    """Tokenizer and template, as they are and in llama.cpp's terms."""
    files = {file.name: file for file in companions}
    found: dict[str, Any] = {}
    for name, key in _TEXT_FILES.items():
        if name not in files:
            continue
        try:
            found[key] = content = files[name].read_bytes().decode("utf-8")
            if key == TOKENIZER_JSON:
                found |= _vocabulary(json.loads(content), vocab_size)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"[:200]
            raise CheckpointError(f"{name} of this checkpoint is truncated or corrupt: {why}") from None
    return found


def _vocabulary(raw: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """`tokenizer.json` in llama.cpp's terms, which know BPE only."""
    model = raw.get("model") or {}
    if model.get("type") != "BPE":
        return {}
    added = {token["id"]: token for token in raw.get("added_tokens") or []}
    texts = {id_: text for text, id_ in model["vocab"].items()}
    texts |= {id_: token["content"] for id_, token in added.items()}
    tokens = [texts.get(id_, f"[PAD{id_}]") for id_ in range(vocab_size)]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model.get("merges") or []]
    if not all(isinstance(text, str) for text in (*tokens, *merges)):
        raise TypeError("a token or a merge is no text")
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * vocab_size,
        "tokenizer.ggml.token_type": [_token_type(id_, texts, added) for id_ in range(vocab_size)],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    if merges:
        found["tokenizer.ggml.merges"] = merges
    ids = {text: id_ for id_, text in texts.items()}
    for name, text in (("bos", "<bos>"), ("padding", "<pad>"), ("unknown", "<unk>"), ("mask", "<mask>")):
        if text in ids:
            found[f"tokenizer.ggml.{name}_token_id"] = ids[text]
    return found


def _token_type(id_: int, texts: dict[int, str], added: dict[int, Any]) -> int:
    if id_ in added:
        return _CONTROL if added[id_].get("special") else _USER_DEFINED
    text = texts.get(id_)
    if text is None:
        return _UNUSED
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return _BYTE if is_byte else _NORMAL
