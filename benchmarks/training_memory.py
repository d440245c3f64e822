"""Peak memory of a LoRA step against the estimate of `dgemma train --dry-run`.

    python -m benchmarks.training_memory --layers 9              (released widths, nine of thirty layers)
    python -m benchmarks.training_memory --preset medium
    python -m benchmarks.training_memory --layers 6 --base int4       (the base frozen in four bits)

The weights are random and made in memory, the step is the trainer's own: forward, backward, Adam; twice,
since Adam's moments appear in the first. Measured is the rise of resident memory above a process that has
imported torch and done a small step; a base in few bits is read from a file in that time.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import record
from dgemma.bench.memory import peak_growth_bytes
from dgemma.checkpoint.load import place
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.presets import PRESETS, layers
from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
from dgemma.checkpoint.quantized.writer import from_random, write_quantized
from dgemma.checkpoint.random_weights import tokenizer_files
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.model.attention import Rope
from dgemma.model.config import ModelConfig
from dgemma.model.transformer import Transformer
from dgemma.training.data.records import Span, TrainingExample
from dgemma.training.memory import estimate_step, with_4bit_base
from dgemma.training.recipe import DataRecipe, Recipe
from dgemma.training.trainer import Trainer

CPU = torch.device("cpu")


def random_model(config: ModelConfig) -> LanguageModel:
    """Cheap random numbers: one block of them over and over; speed and quality do not matter here."""
    block = (torch.randn(1 << 20) * 0.02).bfloat16()
    stack = Transformer(config, dtype=torch.bfloat16, device="meta")
    for spec in tensor_specs(config):
        tensor = torch.empty(spec.shape, dtype=torch.bfloat16)
        if len(spec.shape) == 1:
            tensor.fill_(1)
        else:
            flat = tensor.view(-1)
            for at in range(0, len(flat), len(block)):
                flat[at : at + len(block)] = block[: len(flat) - at]
        place(stack, spec.path, tensor)
    stack.rope = Rope(config, CPU)
    return LanguageModel(stack)


def quantized_model(path: Path) -> LanguageModel:
    return load(path, dtype="bfloat16")


def write_int4(path: Path, config: ModelConfig) -> None:
    with tokenizer_files() as companions:
        original = from_random(config, seed=0, companions=companions)
        write_quantized(path, original, quantization_config_for("int4", config))


def recipe_of(args: argparse.Namespace, config: ModelConfig, out: str) -> Recipe:
    tokens = torch.randint(config.vocab_size, (args.length,)).tolist()
    example = TrainingExample(tuple(tokens), (Span(1, args.length),))
    return Recipe(
        model="random", out=out, data=DataRecipe(records=[example], max_length=args.length), batch=args.batch,
        steps=2, recompute=args.recompute,
    )  # fmt: skip


def train(lm: LanguageModel, recipe: Recipe) -> None:
    trainer = Trainer(recipe, lm=lm)
    for _ in range(recipe.steps):
        print(trainer._do_step())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="of the released geometry")
    parser.add_argument("--preset", choices=PRESETS)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--base", choices=("bf16", "int4"), default="bf16", help="the frozen base's numbers")
    args = parser.parse_args()
    config = PRESETS[args.preset or "26b"].config
    if args.layers:
        shape = {"head_dim": 256, "kv_heads": 8, "full_head_dim": 512, "full_kv_heads": 2}
        config = replace(config, layers=layers(args.layers, **shape))
    with tempfile.TemporaryDirectory() as scratch:
        tiny = random_model(PRESETS["tiny"].config)
        train(
            tiny, recipe_of(argparse.Namespace(**{**vars(args), "length": 64}), tiny.config, scratch + "/a")
        )
        recipe = recipe_of(args, config, str(Path(scratch) / "b"))
        estimate = estimate_step(config, recipe)
        if args.base == "int4":
            write_int4(Path(scratch) / "int4", config)
            estimate = with_4bit_base(estimate, config, recipe)
            made = partial(quantized_model, Path(scratch) / "int4")
        else:
            made = partial(random_model, config)
        measured = peak_growth_bytes(lambda: train(made(), recipe), CPU)
    assert measured is not None
    found = {
        "layers": len(config.layers),
        "estimate_bytes": {**vars(estimate), "total": estimate.total},
        "measured_bytes": measured,
        "measured_over_estimate": round(measured / estimate.total, 3),
        "beyond_weights_measured_over_estimate": round(
            (measured - estimate.weights) / (estimate.total - estimate.weights), 3
        ),
    }
    suffix = f"-{args.preset or '26b'}-{len(config.layers)}" + ("-recompute" if args.recompute else "")
    suffix += "-int4" if args.base == "int4" else ""
    record.write("training_memory", found, suffix)


if __name__ == "__main__":
    main()
