"""Steps of a real `dgemma train` run against a bare compiled PyTorch loop of the same shapes, in turn.

    python -m benchmarks.training_speed                 (2.9 M parameters, 64 examples of 180 tokens)
    python -m benchmarks.training_speed --whole         (the bare loop compiled as one graph: minutes)

The bare loop has the same modules, a batch made ahead, Adam on the bf16 weights, and nothing else: no data,
no float32 masters, no log, no states. The run is the trainer's own with all of these. After each of its steps
the bare loop does one; warm-up steps are not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

from benchmarks import record
from dgemma.bench.timing import spread
from dgemma.checkpoint.load import place
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.presets import layers
from dgemma.checkpoint.random_weights import distribution
from dgemma.language_model import LanguageModel
from dgemma.model.config import LayerKind, ModelConfig, RopeShape
from dgemma.model.transformer import Transformer
from dgemma.training.callbacks import TrainerCallback
from dgemma.training.data.canvases import make_batch
from dgemma.training.data.records import Span, TrainingExample
from dgemma.training.objective import token_losses
from dgemma.training.recipe import DataRecipe, Recipe
from dgemma.training.report import StepReport
from dgemma.training.setup import training_execution
from dgemma.training.trainer import Trainer

ROPE = {kind: RopeShape(theta=1e4, rotated_share=1.0) for kind in LayerKind}
CONFIG = ModelConfig(
    vocab_size=16, hidden_size=128, mlp_size=256, num_heads=4,
    layers=layers(5, head_dim=32, kv_heads=4, full_head_dim=32, full_kv_heads=4, every=3),
    window=256, rope=ROPE, num_experts=8, experts_per_token=2, expert_size=128,
    norm_eps=1e-6, logit_cap=30.0, canvas_len=96, max_positions=1024,
)  # fmt: skip
PROMPT, REPLY = 98, 82


def random_model() -> LanguageModel:
    stack = Transformer(CONFIG, dtype=torch.bfloat16, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for spec in tensor_specs(CONFIG):
        mean, std = distribution(spec)
        numbers = torch.randn(spec.shape, generator=generator) * std + mean
        place(stack, spec.path, numbers.bfloat16())
    return LanguageModel(stack)


class BareLoop:
    """What anyone would write first, compiled."""

    def __init__(
        self, recipe: Recipe, examples: list[TrainingExample], trainer: Trainer, *, whole: bool
    ) -> None:
        self.transformer = random_model().transformer
        self.transformer.execution = training_execution(recipe, CONFIG, torch.device("cpu"))
        self.transformer.requires_grad_(True)
        self.losses = torch.compile(token_losses) if whole else token_losses
        if not whole:
            for layer in self.transformer.layers:
                layer.compile(dynamic=False)
        self.adam = torch.optim.AdamW(self.transformer.parameters(), lr=1e-4, fused=True)
        self.batch = make_batch(examples[: recipe.batch], range(recipe.batch), trainer.setup.canvases)

    def step(self) -> None:
        losses = self.losses(self.transformer, self.batch)
        (losses.diffusion.mean() + losses.encoder.mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.transformer.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


class InTurn(TrainerCallback):
    """Runs the bare loop after each step, and records both times."""

    def __init__(self, bare: BareLoop, warmup: int) -> None:
        self.bare, self.warmup = bare, warmup
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.last = time.perf_counter()

    def on_step(self, report: StepReport) -> None:
        now = time.perf_counter()
        self.bare.step()
        after = time.perf_counter()
        if report.step > self.warmup:
            self.ours.append(now - self.last)
            self.theirs.append(after - now)
        print(f"{report.step}: {now - self.last:.2f} s, bare {after - now:.2f} s", flush=True)
        self.last = after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--whole", action="store_true", help="compile the bare loop as one graph")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CONFIG.vocab_size, (256, PROMPT + REPLY), generator=generator).tolist()
    examples = [TrainingExample(tuple(row), (Span(PROMPT, PROMPT + REPLY),)) for row in tokens]
    warmup = 2
    with tempfile.TemporaryDirectory() as out:
        recipe = Recipe(
            model="random", out=out, data=DataRecipe(records=examples, max_length=PROMPT + REPLY),
            train="all", freeze=(), batch=args.batch, steps=args.rounds + warmup, compile=True,
        )  # fmt: skip
        trainer = Trainer(recipe, lm=random_model())
        turns = InTurn(BareLoop(recipe, examples, trainer, whole=args.whole), warmup)
        trainer.run(turns)
    ratios = [a / b for a, b in zip(turns.ours, turns.theirs, strict=True)]
    positions = args.batch * (PROMPT + REPLY + CONFIG.canvas_len)
    record.write(
        "training_speed",
        {
            "parameters": trainer.num_trained,
            "dgemma_seconds_per_step": spread(turns.ours),
            "bare_seconds_per_step": spread(turns.theirs),
            "dgemma_over_bare": spread(ratios),
            "dgemma_tokens_per_second": spread([positions / s for s in turns.ours]),
        },
    )


if __name__ == "__main__":
    main()
