"""The text model before its first step: random weights beside the tokenizer of `make_tokenizer`.

python -m recipes.text.make_model --tokenizer data/text/tokenizer --out runs/text/start
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.presets import layers
from dgemma.checkpoint.random_weights import write_random
from dgemma.model.config import LayerKind, ModelConfig, RopeShape
from dgemma.text.tokenizer import Tokenizer

# Contexts are a few hundred tokens: slower turns than the released model's would hardly turn at all.
ROPE = {
    LayerKind.SLIDING: RopeShape(theta=1e3, rotated_share=1.0),
    LayerKind.FULL: RopeShape(theta=1e4, rotated_share=0.5),
}
# Colder than the released model's 0.8 to 0.4, at which canvases of so small a model never settle
# (docs/text-model.md).
TEMPERATURES = {"t_max": 0.5, "t_min": 0.2}


def config_of(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=256, mlp_size=512, num_heads=4,
        layers=layers(8, head_dim=64, kv_heads=2, full_head_dim=64, full_kv_heads=2, every=4),
        window=128, rope=ROPE, num_experts=12, experts_per_token=2, expert_size=128,
        norm_eps=1e-6, logit_cap=30.0, canvas_len=64, max_positions=4096,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/text/tokenizer"))
    parser.add_argument("--out", type=Path, default=Path("runs/text/start"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = config_of(Tokenizer.from_directory(args.tokenizer).vocab_size)
    companions = sorted(args.tokenizer.iterdir())
    write_random(args.out, config, dtype="F32", seed=args.seed, companions=companions)
    generation = args.out / "generation_config.json"
    settings = {**json.loads(generation.read_text()), **TEMPERATURES}
    generation.write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{args.out}: {count_parameters(config).total_parameters:,} random parameters")


if __name__ == "__main__":
    main()
