"""The Sudoku model before its first step: random weights, and a tokenizer of 22 pieces.

python -m recipes.sudoku.make_model --out runs/sudoku/start
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers

from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.random_weights import write_random
from dgemma.model.config import LayerKind, LayerShape, ModelConfig, RopeShape
from dgemma.sudoku.tokens import ANSWER_LEN, BOS, EOS, PAD, SPECIALS, VOCABULARY

NUM_LAYERS = 6
# Wavelengths from 6 to 200 tokens, one of them a row's 10: all that a puzzle and its answer have room for.
ROPE = RopeShape(theta=41.0, rotated_share=1.0)
CONFIG = ModelConfig(
    vocab_size=len(VOCABULARY),
    hidden_size=192,
    mlp_size=384,
    num_heads=4,
    layers=tuple(
        LayerShape(
            # The last layer of this family always is of the full kind. The window holds everything.
            kind=LayerKind.SLIDING if number < NUM_LAYERS - 1 else LayerKind.FULL,
            num_kv_heads=4,
            head_dim=32,
        )
        for number in range(NUM_LAYERS)
    ),
    window=512,
    rope={LayerKind.SLIDING: ROPE, LayerKind.FULL: ROPE},
    num_experts=8,
    experts_per_token=2,
    expert_size=96,
    norm_eps=1e-6,
    logit_cap=30.0,
    canvas_len=ANSWER_LEN,
    max_positions=512,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sudoku/start"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_model(args.out, seed=args.seed)
    print(f"{args.out}: {count_parameters(CONFIG).total_parameters:,} random parameters")


def make_model(out: Path, *, seed: int = 0) -> None:
    with TemporaryDirectory() as made:
        companions = write_companions(Path(made))
        write_random(out, CONFIG, dtype="F32", seed=seed, companions=companions)


def write_companions(directory: Path) -> list[Path]:
    """Tokenizer and generation defaults."""
    pieces = {piece: id_ for id_, piece in enumerate(VOCABULARY)}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=pieces, merges=[]))
    engine.decoder = tokenizers.decoders.Fuse()
    engine.add_special_tokens(list(SPECIALS))
    names = dict(zip(("pad_token", "eos_token", "bos_token"), SPECIALS, strict=True))
    contents = {
        "tokenizer.json": json.loads(engine.to_str()),
        "tokenizer_config.json": names,
        "generation_config.json": {
            "eos_token_id": [EOS],
            "bos_token_id": BOS,
            "pad_token_id": PAD,
            "max_new_tokens": ANSWER_LEN,
            # Hot, then as trained: a guess that is fed back too sure of itself is never given up. Chosen on
            # training puzzles (docs/sudoku.md).
            "t_max": 1.5,
            "t_min": 1.0,
            "confidence_threshold": 0.03,
        },
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    return [directory / name for name in contents]


if __name__ == "__main__":
    main()
