"""Open a GGUF file as a checkpoint: its metadata as the configuration, its tensors by their released names.

Imports no torch. Plain tensors (F32, F16, BF16) are read from the file as those of safetensors are; blocks of
quantized values become quantized weights, an expert at a time.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from dgemma.checkpoint.gguf_names import (
    ARCHITECTURE,
    CANVAS_LENGTH,
    HEAD,
    NOT_ROTATED,
    ROPE_FREQUENCIES,
    SAMPLER_KEYS,
    gguf_name,
    halves_of,
)
from dgemma.checkpoint.names import TensorSpec
from dgemma.checkpoint.quantized.schemes import BLOCK_TYPES, GgufBlocks
from dgemma.checkpoint.quantized.tensor_index import QuantizedEntry, QuantizedModule
from dgemma.checkpoint.safetensors_file import TensorEntry, read_into
from dgemma.errors import CheckpointError, ConfigError
from dgemma.gguf_file import GgufFile, GgufTensor, read_gguf
from dgemma.model.config import ModelConfig

PLAIN_TYPES = ("F32", "F16", "BF16")
_MAX_FREQUENCIES = 1 << 19
_MAX_GENERATION_BYTES = 1 << 20
GENERATION_CONFIG = "dgemma.generation_config"  # the file as it was; ours alone


class GgufTensors:
    """The tensors of a file, taken one by one; what is left at the end does not belong to the model."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self._left = dict(gguf.tensors)
        self._left.pop(ROPE_FREQUENCIES, None)  # read with the configuration

    @property
    def names(self) -> list[str]:
        return list(self._left)

    def take(self, spec: TensorSpec) -> TensorEntry | QuantizedEntry | None:
        """The tensor of `spec`; None if the file lacks it."""
        name = gguf_name(spec.name)
        whole = self._left.pop(name, None)
        if whole is not None:
            return self._entry(spec, whole)
        found = [self._left.get(half) for half in halves_of(name)]
        if not found or None in found:
            return None
        experts, both, inner = spec.shape
        halves = [self._left.pop(half) for half in halves_of(name)]
        for half in halves:
            self._check_shape(half, (experts, both // 2, inner))
        return self._joined(spec, halves)

    def head(self, embedding: TensorEntry | QuantizedEntry) -> tuple[TensorEntry, TensorEntry] | None:
        """The embedding and its copy, the head, where the file has one."""
        tensor = self._left.pop(HEAD, None)
        if tensor is None:
            return None
        first = embedding if isinstance(embedding, TensorEntry) else embedding.modules[0].entries["blocks"]
        copy = _raw(self._gguf, tensor, tensor.start, tensor.nbytes, first.shape)
        if first.nbytes != tensor.nbytes or isinstance(embedding, TensorEntry) != (
            tensor.type.name in PLAIN_TYPES
        ):
            raise self._gguf.refuse(
                f"has {HEAD!r} in another form than the embedding, but this model ties them. dgemma supports "
                "tied checkpoints only."
            )
        return first, replace(copy, dtype=first.dtype)

    def _entry(self, spec: TensorSpec, tensor: GgufTensor) -> TensorEntry | QuantizedEntry:
        self._check_shape(tensor, spec.shape)
        if tensor.type.name in PLAIN_TYPES:
            return TensorEntry(
                tensor.name, tensor.type.name, tensor.shape, self._gguf.path, tensor.start, tensor.nbytes
            )
        if len(spec.shape) == 1:
            raise self._gguf.refuse(
                f"has tensor {tensor.name!r} as {tensor.type.name}; a vector is stored as "
                f"{', '.join(PLAIN_TYPES)}."
            )
        return self._joined(spec, [tensor])

    def _joined(self, spec: TensorSpec, tensors: list[GgufTensor]) -> TensorEntry | QuantizedEntry:
        """One weight of one or two tensors: expert by expert, each the rows of the one and of the other."""
        kind = tensors[0].type
        if any(tensor.type != kind for tensor in tensors):
            raise self._gguf.refuse(
                f"has {tensors[0].name!r} as {kind.name} and {tensors[1].name!r} as {tensors[1].type.name}; "
                "dgemma reads gate and up projections of one type."
            )
        if kind.name in PLAIN_TYPES:
            raise self._gguf.refuse(
                f"has {tensors[0].name!r} and {tensors[1].name!r} in {kind.name}; dgemma reads plain experts "
                "with gate and up projections in one tensor."
            )
        if kind.name not in BLOCK_TYPES:
            raise self._gguf.refuse(
                f"has tensor {tensors[0].name!r} as {kind.name}; dgemma reads "
                f"{', '.join((*PLAIN_TYPES, *BLOCK_TYPES))}. Take the model in another quantization."
            )
        experts = spec.shape[0] if len(spec.shape) == 3 else 1
        inner = spec.shape[-1]
        modules = []
        for expert in range(experts):
            for tensor in tensors:
                nbytes = tensor.nbytes // experts
                shape = (tensor.shape[-2], inner // kind.block_len * kind.block_bytes)
                entry = _raw(self._gguf, tensor, tensor.start + expert * nbytes, nbytes, shape)
                modules.append(QuantizedModule(tensor.name, {"blocks": entry}))
        return QuantizedEntry(GgufBlocks(f"GGUF {kind.name}", kind), spec.shape, modules)

    def _check_shape(self, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise self._gguf.refuse(
                f"has tensor {tensor.name!r} of shape {list(tensor.shape)}; its metadata requires "
                f"{list(shape)}. Weights and metadata do not belong together."
            )


def _raw(gguf: GgufFile, tensor: GgufTensor, start: int, nbytes: int, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(tensor.name, "U8", shape, gguf.path, start, nbytes)


def gguf_config(path: str | Path) -> tuple[dict[str, Any], ModelConfig]:
    """The metadata of a file as the dictionary of a `config.json`, and its ModelConfig."""
    gguf = read_gguf(path)
    number = gguf.metadata.get("split.count", 1)
    if number not in (0, 1):
        raise gguf.refuse(
            f"is one of {number} parts; dgemma reads whole files. Join them: llama-gguf-split --merge."
        )
    try:
        config = ModelConfig.from_json(_Metadata(gguf).config())
    except ConfigError as error:
        raise ConfigError(f"{gguf.path}: {error}") from None
    raw = config.to_json()
    types = {tensor.type.name for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    raw["dtype"] = "float32" if types <= {"F32"} else "bfloat16"
    if not types <= set(PLAIN_TYPES):
        raw["quantization_config"] = {"quant_method": "gguf", "types": sorted(types)}
    return raw, config


def gguf_generation_config(path: Path) -> dict[str, Any]:
    """The metadata of a file as the dictionary of a `generation_config.json`."""
    gguf = read_gguf(path)
    whole = gguf.text(GENERATION_CONFIG, max_bytes=_MAX_GENERATION_BYTES)
    if whole is not None:
        try:
            found = json.loads(whole)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise gguf.refuse(f"has {GENERATION_CONFIG!r}, which is not a JSON object; it is corrupt.")
        return found
    found = {}
    for name, key in SAMPLER_KEYS.items():
        value = gguf.metadata.get(key)
        if value is not None:
            found[name] = _shortest(value) if isinstance(value, float) else value
    if "entropy_bound" in found:
        found["sampler_config"] = {"entropy_bound": found.pop("entropy_bound")}
    ends = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    if len(known) > 1 or known not in ([], [1], [106]):  # llama.cpp adds the end of a turn by its name
        found["eos_token_id"] = known
    return found


class _Metadata:
    """Typed access to the geometry."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        architecture = gguf.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise gguf.refuse(
                f"holds a model of architecture {architecture!r}; of GGUF dgemma reads {ARCHITECTURE!r}."
            )

    def config(self) -> dict[str, Any]:
        num_layers = self._integer("block_count")
        if not 1 <= num_layers <= 1024:
            raise ConfigError(f"block_count is {num_layers}; 1 to 1024 are supported.")
        is_sliding = self._pattern(num_layers)
        heads = {
            True: self._integer("attention.key_length_swa"),
            False: self._integer("attention.key_length"),
        }
        self._refuse_other_models(heads)
        kv_heads = self._of_layers("attention.head_count_kv", num_layers)
        mlp_sizes = set(self._of_layers("feed_forward_length", num_layers))
        if len(mlp_sizes) != 1:
            raise ConfigError(f"feed_forward_length is {sorted(mlp_sizes)}; all layers must have one.")
        embedding = self._gguf.tensors.get("token_embd.weight")
        if embedding is None:
            raise self._gguf.refuse("lacks 'token_embd.weight'; the download is incomplete.")
        rope = {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": self._number("rope.freq_base_swa", 10_000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": self._number("rope.freq_base", 10_000.0),
                "partial_rotary_factor": self._rotated_share(heads[False]),
            },
        }
        return {
            "model_type": "diffusion_gemma",
            "canvas_length": self._integer(CANVAS_LENGTH, prefix=""),
            "text_config": {
                "vocab_size": embedding.shape[0],
                "hidden_size": self._integer("embedding_length"),
                "intermediate_size": mlp_sizes.pop(),
                "num_hidden_layers": num_layers,
                "num_attention_heads": self._integer("attention.head_count"),
                "per_layer_config": {
                    str(layer): {"head_dim": heads[slides], "num_key_value_heads": kv_heads[layer]}
                    for layer, slides in enumerate(is_sliding)
                },
                "layer_types": ["sliding_attention" if s else "full_attention" for s in is_sliding],
                "sliding_window": self._integer("attention.sliding_window"),
                "rope_parameters": rope,
                "num_experts": self._integer("expert_count"),
                "top_k_experts": self._integer("expert_used_count"),
                "moe_intermediate_size": self._integer("expert_feed_forward_length"),
                "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", 1e-6),
                "final_logit_softcapping": self._number("final_logit_softcapping", 30.0),
                "max_position_embeddings": self._integer("context_length"),
            },
        }

    def _refuse_other_models(self, heads: dict[bool, int]) -> None:
        """Features of other Gemma models, which this one has not."""
        for key, wanted in (
            ("attention.shared_kv_layers", 0),
            ("embedding_length_per_layer_input", 0),
            ("attention.value_length", heads[False]),
            ("attention.value_length_swa", heads[True]),
            ("rope.dimension_count", heads[False]),
            ("rope.dimension_count_swa", heads[True]),
            ("rope.scaling.factor", 1.0),
        ):
            value = self._get(key)
            if value is not None and value != wanted:
                raise ConfigError(f"{ARCHITECTURE}.{key} is {value!r}; dgemma supports only {wanted!r}.")

    def _pattern(self, num_layers: int) -> tuple[bool, ...]:
        pattern = self._get("attention.sliding_window_pattern")
        is_whole = isinstance(pattern, tuple) and len(pattern) == num_layers
        if not is_whole or not all(isinstance(slides, bool) for slides in pattern):
            raise ConfigError(
                f"{ARCHITECTURE}.attention.sliding_window_pattern must be {num_layers} booleans, one a layer."
            )
        return tuple(pattern)

    def _of_layers(self, key: str, num_layers: int) -> tuple[int, ...]:
        """A number of each layer: the file has one for all, or a list."""
        value = self._get(key)
        if not isinstance(value, tuple):
            return (self._integer(key),) * num_layers
        if len(value) != num_layers or not all(type(number) is int for number in value):
            raise ConfigError(f"{ARCHITECTURE}.{key} must be {num_layers} whole numbers, one per layer.")
        return value

    def _rotated_share(self, head_dim: int) -> float:
        """The share of a full layer's head that rotates, from the divisors of its frequencies."""
        tensor = self._gguf.tensors.get(ROPE_FREQUENCIES)
        if tensor is None:
            return 1.0
        if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,) or head_dim > _MAX_FREQUENCIES:
            raise ConfigError(f"{ROPE_FREQUENCIES} must be {head_dim // 2} numbers in F32.")
        divisors = array("f", bytes(tensor.nbytes))
        read_into(_raw(self._gguf, tensor, tensor.start, tensor.nbytes, tensor.shape), divisors)
        rotated = next((i for i, divisor in enumerate(divisors) if divisor != 1), len(divisors))
        if any(not NOT_ROTATED * 0.99 < divisor < math.inf for divisor in divisors[rotated:]):
            raise ConfigError(
                f"{ROPE_FREQUENCIES} scales frequencies; dgemma reads 1 for those that rotate, then "
                f"{NOT_ROTATED:g} for the others."
            )
        return 2 * rotated / head_dim

    def _get(self, key: str, prefix: str = ARCHITECTURE + ".") -> Any:
        return self._gguf.metadata.get(prefix + key)

    def _integer(self, key: str, prefix: str = ARCHITECTURE + ".") -> int:
        value = self._get(key, prefix)
        if value is None:
            raise ConfigError(f"the metadata lacks {prefix + key!r}, which the model's geometry needs.")
        if type(value) is not int:
            raise ConfigError(f"{prefix}{key} is {value!r}; it must be a whole number.")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"{ARCHITECTURE}.{key} is {value!r}; it must be a finite number.")
        return _shortest(value)


def _shortest(value: float) -> float:
    """The shortest decimal that is this number in fp32: GGUF has 1e-6 as 9.99999997e-7."""
    for digits in range(1, 9):
        near = float(f"{value:.{digits}g}")
        if abs(near) < 3e38 and struct.pack("<f", near) == struct.pack("<f", value):
            return near
    return value


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a directory that has no safetensors: the only one, but for images' projectors."""
    if any((directory / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return None
    found = sorted(file for file in directory.glob("*.gguf") if not file.name.lower().startswith("mmproj"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise CheckpointError(f"{directory} holds {len(found)} GGUF files ({names}); give one of them.")
    return found[0] if found else None
