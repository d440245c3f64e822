"""Show a model's geometry, parameters, bytes and cache, and whether it fits this machine.

Only config.json is read, and fetched if MODEL is on the hub: no weights are needed, and none are loaded. With
--check the headers of the weights are read too, and whatever would not load is refused by name. The header of
a GGUF file is always read whole; the types of its tensors are shown, and what they take in memory."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict

from dgemma.checkpoint.division import part_bytes
from dgemma.checkpoint.hub import resolve, resolve_config
from dgemma.checkpoint.parameter_count import ParameterCounts, count_parameters
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint, read_config, weights_path
from dgemma.gguf_file import is_gguf
from dgemma.machine import memory_facts, size_text
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.model_part import ModelPart

EXAMPLES = "examples:\n  dgemma info bundled:text\n  dgemma info path/to/checkpoint --json"

# What is needed beside the weights: activations, one canvas's logits, the interpreter.
_EXTRA_BYTES = 2_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="MODEL",
        help="a checkpoint directory, a config.json, a GGUF file, bundled:text, or a hub name",
    )
    parser.add_argument("--check", action="store_true", help="check the weights' headers as well")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        default=1,
        help="what each of N processes holds (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    path = resolve(args.path) if args.check else resolve_config(args.path)
    _, config = read_config(path)
    source = open_checkpoint(path) if args.check or is_gguf(weights_path(path)) else None
    census = count_parameters(config)
    size = args.tensor_parallel
    ranks = [part_bytes(ModelPart(config, rank, size), item_bytes=2) for rank in range(max(size, 1))]
    memory = memory_facts().memory_bytes
    fits = {name: size + _EXTRA_BYTES <= memory for name, size in census.bytes.items()}
    if args.json:
        found = {
            **asdict(census),
            "fits_this_machine": fits,
            "memory_bytes": memory,
            "geometry": _geometry(config),
        }
        if size > 1:
            found["bf16_bytes_of_ranks"] = ranks
        if source is not None:
            found["weights_complete"] = True
            found["tensors_by_type"] = _by_type(source)
            found["loaded_bytes"] = _loaded_bytes(source)
        print(json.dumps(found, indent=2))
    else:
        print(_page(config, census, fits, memory))
        if size > 1:
            print(
                f"weights of each of {size} processes in bf16\n  {'at most':<26}{size_text(max(ranks)):>22}"
            )
        if source is not None:
            schemes = {entry.scheme.name for entry in source.quantized.values()}
            quantized = f", quantized ({', '.join(sorted(schemes))})" if schemes else ""
            print(f"weights: {size_text(source.nbytes)} in {len(source.files)} files, complete{quantized}")
            for kind, (count, size) in sorted(_by_type(source).items()):
                print(f"  {kind:<26}{size_text(size):>22}   {count} tensors")
            print(f"  {'in memory, as stored':<26}{size_text(_loaded_bytes(source)):>22}")
    return 0


def _by_type(source: CheckpointSource) -> dict[str, tuple[int, int]]:
    """Of each type of the file: how many tensors of the model have it, and their bytes."""
    found: dict[str, tuple[int, int]] = {}
    plain = ((entry.dtype, entry.nbytes) for entry in source.entries.values())
    quantized = ((entry.scheme.name, entry.nbytes) for entry in source.quantized.values())
    for kind, nbytes in (*plain, *quantized):
        count, total = found.get(kind, (0, 0))
        found[kind] = (count + 1, total + nbytes)
    return found


def _loaded_bytes(source: CheckpointSource) -> int:
    """Bytes of the loaded weights: plain ones in the model's dtype, quantized ones packed as stored."""
    item_bytes = 4 if source.raw_config.get("dtype") == "float32" else 2
    plain = sum(item_bytes * math.prod(entry.shape) for entry in source.entries.values())
    return plain + sum(entry.nbytes for entry in source.quantized.values())


def _geometry(config: ModelConfig) -> dict[str, int]:
    full = sum(layer.kind is LayerKind.FULL for layer in config.layers)
    return {
        "layers": len(config.layers),
        "full_attention_layers": full,
        "sliding_attention_layers": len(config.layers) - full,
        "hidden_size": config.hidden_size,
        "query_heads": config.num_heads,
        "window": config.window,
        "experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
        "expert_size": config.expert_size,
        "shared_mlp_size": config.mlp_size,
        "vocabulary": config.vocab_size,
        "canvas": config.canvas_len,
        "max_context": config.max_positions,
    }


def _page(config: ModelConfig, census: ParameterCounts, fits: dict[str, bool], memory: int) -> str:
    def rows(pairs: list[tuple[str, str]]) -> list[str]:
        return [f"  {name:<26}{value:>22}" for name, value in pairs]

    lines = ["geometry"]
    lines += rows([(k.replace("_", " "), f"{v:,}") for k, v in _geometry(config).items()])
    lines.append("parameters (tied weights counted once)")
    parts = census.parameters_by_part.items()
    lines += rows([(name.replace("_", " "), f"{n:,}") for name, n in parts])
    lines += rows(
        [
            ("total", _with_short(census.total_parameters)),
            ("active per token", _with_short(census.active_parameters)),
            *([("vision tower, besides", _with_short(census.vision_parameters))] if config.vision else []),
        ]
    )
    lines.append("weights in memory")
    for name, size in census.bytes.items():
        verdict = "fits here" if fits[name] else "does not fit here"
        lines.append(f"  {name:<26}{size_text(size):>22}   {verdict}")
    lines.append(f"  {'memory of this machine':<26}{size_text(memory):>22}")
    lines.append("cache per sequence in bf16, per 1,000 tokens of context")
    kv = census.kv_bytes_per_1k_tokens
    lines += rows(
        [
            ("full layers", size_text(kv["full"])),
            ("sliding layers", size_text(kv["sliding"])),
            (f"  (at most {config.window - 1:,} tokens)", size_text(census.kv_window_bytes)),
        ]
    )
    return "\n".join(lines)


def _with_short(count: int) -> str:
    return f"{_short(count)} {count:,}"


def _short(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
