"""Scenes told again by the model's own causal side, as a teacher of its canvases.

    python -m recipes.english.retell --out data/english/retold.jsonl

A canvas is written at all places at once, so it suffers where a text could go on in many ways: nearly one
token a step can be accepted. Left to right the same weights choose one way; greedily, always the likeliest.
Each scene keeps its first sentences, which are the prompt. Begun again, it goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from dgemma import load
from recipes.english.prose import sentences

AT_ONCE = 64
MOST = 20_000
MAX_TOKENS = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled:text")
    parser.add_argument("--corpus", type=Path, default=Path("data/english/train.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("data/english/retold.jsonl"))
    parser.add_argument(
        "--count", type=int, default=10_000, help=f"scenes (default: 10,000, at most {MOST:,})"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lm = load(args.model, dtype="float32")
    bos, encode = lm.tokenizer.bos_id, lm.tokenizer.encode
    assert bos is not None
    begun = [(bos, *encode(text)) for text in beginnings(args.corpus, args.count, args.seed)]
    done = len(args.out.read_text("utf-8").splitlines()) if args.out.exists() else 0
    done -= done % AT_ONCE  # a group that was cut off is written anew
    if args.out.exists():
        kept = args.out.read_text("utf-8").splitlines(keepends=True)[:done]
        args.out.write_text("".join(kept), "utf-8")
    began = time.monotonic()
    with args.out.open("a", encoding="utf-8") as lines:
        for at in range(done, len(begun), AT_ONCE):
            group = begun[at : at + AT_ONCE]
            answers = lm.generate(group, decode="causal", temperature=0.0, max_tokens=MAX_TOKENS)
            for prompt, answer in zip(group, answers, strict=True):
                record = {
                    "tokens": [*prompt, *answer.tokens],
                    "responses": [[len(prompt), len(prompt) + len(answer.tokens)]],
                    "clipped": answer.finish_reason == "length",
                }
                lines.write(json.dumps(record) + "\n")
            lines.flush()
            speed = (at + len(group) - done) / (time.monotonic() - began)
            print(f"{at + len(group):,} of {len(begun):,} scenes, {speed:.1f}/s", flush=True)


def beginnings(corpus: Path, count: int, seed: int) -> list[str]:
    """The first sentence or two of training scenes."""
    draw = random.Random(seed)
    entries = [json.loads(line) for line in corpus.read_text("utf-8").splitlines()]
    scenes = [sentences(entry["text"]) for entry in entries if entry["source"] == "scenes"]
    # Of all, so that the first of them are the same for any number.
    drawn = draw.sample([scene for scene in scenes if len(scene) > 2], MOST)
    return [" ".join(scene[: draw.randint(1, 2)]) for scene in drawn][:count]


if __name__ == "__main__":
    main()
