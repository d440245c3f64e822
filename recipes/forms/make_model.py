"""The forms model before its first step: a tokenizer learned from made messages, and random weights.

    python -m recipes.forms.make_model --out runs/forms/start
    python -m recipes.forms.make_model --weights OLD --out runs/forms/start

The second one takes tokenizer and weights of an earlier model, and the canvas and record types of today.

A word has the same pieces in a message and in a record: a space stands alone, and so does a capital letter,
so that `Lunch` and `lunch` differ in one token. Digits stand alone. The quotes and brackets between two
fields are one piece.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Regex

from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.random_weights import write_random
from dgemma.forms.extraction import FILE_NAME
from dgemma.forms.record_types import RECORD_TYPES
from dgemma.model.config import LayerKind, LayerShape, ModelConfig, RopeShape
from recipes.forms.layout import CANVAS
from recipes.forms.messages import make_message
from recipes.tokenizer import learn, write_tokenizer

WITHIN = Regex(r'[a-z]+|[{}\[\]":,]+')
NUM_PIECES = 661  # 1,024 with bytes and control tokens
NUM_MESSAGES = 20_000
NUM_LAYERS = 6
# Low temperatures and a wide bound: a canvas settles in 3 steps in place of 18, with no more errors
# (docs/lab-notes.md).
GENERATION = {
    "max_new_tokens": 2 * CANVAS,
    "max_denoising_steps": 12,
    "t_min": 0.05,
    "t_max": 0.15,
    "confidence_threshold": 0.05,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 1.0},
}
ROPE = RopeShape(theta=500.0, rotated_share=1.0)
CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=192,
    mlp_size=384,
    num_heads=6,
    layers=tuple(
        LayerShape(
            # The last layer of this family always is of the full kind. The window holds everything.
            kind=LayerKind.SLIDING if number < NUM_LAYERS - 1 else LayerKind.FULL,
            num_kv_heads=6,
            head_dim=32,
        )
        for number in range(NUM_LAYERS)
    ),
    window=512,
    rope={LayerKind.SLIDING: ROPE, LayerKind.FULL: ROPE},
    num_experts=8,
    experts_per_token=2,
    expert_size=128,
    norm_eps=1e-6,
    logit_cap=30.0,
    canvas_len=CANVAS,
    max_positions=1024,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/forms/start"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="a model of the same size, in place of random weights")
    args = parser.parse_args()
    if args.weights is None:
        make_model(args.out, seed=args.seed)
    else:
        renew(args.weights, args.out)
    print(f"{args.out}: {count_parameters(CONFIG).total_parameters:,} parameters")


def make_model(out: Path, *, seed: int = 0) -> None:
    with TemporaryDirectory() as made:
        directory = Path(made)
        write_companions(directory)
        write_random(out, CONFIG, dtype="F32", seed=seed, companions=sorted(directory.iterdir()))


def renew(old: Path, out: Path) -> None:
    shutil.copytree(old, out)
    for name, entries in (
        ("config.json", {"canvas_length": CANVAS}),
        ("generation_config.json", GENERATION),
        (FILE_NAME, RECORD_TYPES),
    ):
        _update(out / name, entries)


def _update(file: Path, entries: Mapping[str, Any]) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **entries}, indent=2) + "\n")


def write_companions(directory: Path) -> None:
    """Tokenizer, chat template, generation defaults and record types."""
    messages = [make_message("train", number, seed=7) for number in range(NUM_MESSAGES)]
    texts = [text for message in messages for text in (message.prompt, message.answer)]
    pieces, merges = learn(texts, NUM_PIECES, WITHIN)
    assert write_tokenizer(directory, pieces, merges) == CONFIG.vocab_size
    _update(directory / "generation_config.json", GENERATION)
    _update(directory / FILE_NAME, RECORD_TYPES)


if __name__ == "__main__":
    main()
