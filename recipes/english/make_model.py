"""The text model before its first step: a tokenizer learned from the corpus, and random weights.

python -m recipes.english.make_model --corpus data/english --out runs/english/start
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.random_weights import write_random
from dgemma.model.config import LayerKind, LayerShape, ModelConfig, RopeShape
from recipes.tokenizer import BYTES, control_names, learn, write_tokenizer

VOCAB_SIZE = 3072
CANVAS = 32  # a sentence
NUM_LAYERS = 6
ROPE = RopeShape(theta=500.0, rotated_share=1.0)
CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    mlp_size=256,
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
    expert_size=64,
    norm_eps=1e-6,
    logit_cap=30.0,
    canvas_len=CANVAS,
    max_positions=4096,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("data/english"))
    parser.add_argument("--out", type=Path, default=Path("runs/english/start"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with TemporaryDirectory() as made:
        directory = Path(made)
        pieces, merges = learn(texts(args.corpus), VOCAB_SIZE - len(BYTES) - len(control_names()))
        assert write_tokenizer(directory, pieces, merges) == VOCAB_SIZE
        write_random(args.out, CONFIG, dtype="F32", seed=args.seed, companions=sorted(directory.iterdir()))
    print(f"{args.out}: {count_parameters(CONFIG).total_parameters:,} random parameters")


def texts(corpus: Path) -> list[str]:
    lines = [
        *(corpus / "train.jsonl").read_text("utf-8").splitlines(),
        *(corpus / "chats" / "train.jsonl").read_text("utf-8").splitlines()[::4],  # their answers are above
    ]
    records = map(json.loads, lines)
    return [record.get("text", record.get("prompt")) for record in records]


if __name__ == "__main__":
    main()
