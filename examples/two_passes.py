"""Refine one canvas by hand with the causal and the denoising pass, and print its mean entropy.

python examples/two_passes.py my-model
"""

from __future__ import annotations

import sys

import torch

import dgemma


def main(path: str) -> None:
    lm = dgemma.load(path, dtype="float32")
    cache = lm.new_cache(batch=1)
    torch.manual_seed(0)
    with torch.inference_mode():
        lm.encode(torch.tensor([[2, 105, 500, 600, 106]]), cache)
        canvas = torch.randint(lm.config.vocab_size, (1, lm.config.canvas_len))
        soft = None
        for step in range(6):
            logits = lm.logits(lm.denoise(canvas, cache, soft))
            guess = logits.argmax(-1)
            entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
            changed = int((guess != canvas).sum())
            print(f"step {step}: mean entropy {entropy:.3f} nats, {changed} tokens changed")
            canvas, soft = guess, lm.soft_embedding(logits)
        lm.encode(canvas, cache)
    print(f"context is now {cache.lengths[0]} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
