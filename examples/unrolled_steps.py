"""Send gradients through three refinement steps, check them, and train on what the last step says.

Tokens are discrete, but what a step tells the next one, its soft embedding, is not: gradients flow along it.

python examples/unrolled_steps.py my-model
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import dgemma

PROMPT, TARGET = "The sea is", "salty because rivers carry salt from the land, and the sun takes only water."
ADAPTER = dgemma.LoraSettings(targets=("self_conditioning", "experts"))
TEMPERATURES = dgemma.Sampler().schedule(torch.tensor([3, 2, 1]), 3).tolist()  # as at inference


@dataclass
class Rollout:
    """One canvas after one prompt. Its tokens stay; from step to step only `soft` changes."""

    cache: dgemma.KVCache
    canvas: Tensor  # [1, canvas]
    target: Tensor  # [canvas]
    start: Tensor  # [1, canvas, hidden] what the first step sees

    def loss(self, lm: dgemma.LanguageModel, steps: int = 3, *, cut: bool = False) -> Tensor:
        """Cross-entropy of the target after so many steps. `cut`: gradients within the last step only."""
        soft = self.start
        for temperature in TEMPERATURES[-steps:]:
            logits = lm.logits(lm.denoise(self.canvas, self.cache, soft.detach() if cut else soft))
            soft = lm.soft_embedding(logits / temperature)
        return F.cross_entropy(logits[0].double(), self.target)  # fp32 counts in steps of 1e-6 here


def check_gradient(name: str, loss: Callable[[], Tensor], moved: list[Tensor], routes: list[Tensor]) -> None:
    """Compare the gradient's length with the slope measured along it.

    A move that swaps a token's experts makes the loss jump, which no derivative knows; one too small drowns
    in rounding. Along the gradient a loss changes most, and the move is shortened until no expert changes.
    """
    gradient = torch.autograd.grad(loss(), moved)
    length = torch.stack([part.norm() for part in gradient]).norm().item()
    for change in (1e-3, 3e-4, 1e-4, 3e-5, 1e-5):  # of the loss, to either side
        ends, way = [], change / length
        with torch.no_grad():
            for distance in (way, -2 * way, way):  # there, to the other side, and back
                for tensor, part in zip(moved, gradient, strict=True):
                    tensor += distance / length * part
                routes.clear()
                ends.append((loss().item(), torch.cat(routes)))
        if all(torch.equal(chosen, ends[-1][1]) for _, chosen in ends):
            break
    slope = (ends[0][0] - ends[1][0]) / (2 * way)
    print(f"{name}: gradient {length:.6f}, measured {slope:.6f} by moving the loss by {change:g}")
    assert abs(slope / length - 1) < 0.02


def main(path: str) -> None:
    base = dgemma.load(path, dtype="float32")
    torch.manual_seed(0)
    tokenizer, length, cache = base.tokenizer, base.config.canvas_len, base.new_cache()
    canvas = torch.randint(base.config.vocab_size, (1, length))
    target = torch.tensor((tokenizer.encode(TARGET) + [tokenizer.eos_id] * length)[:length])
    with torch.no_grad():
        base.encode(torch.tensor([[tokenizer.bos_id, *tokenizer.encode(PROMPT)]]), cache)
        start = base.soft_embedding(base.logits(base.denoise(canvas, cache)))
    rollout = Rollout(cache, canvas, target, start)

    lm = base.with_adapter(ADAPTER)
    routes: list[Tensor] = []
    for layer in lm.transformer.layers:
        layer.router.register_forward_hook(lambda _, __, out: routes.append(out[1].sort().values.flatten()))
    factors = [p for p in lm.transformer.parameters() if p.requires_grad]
    check_gradient("adapter", lambda: rollout.loss(lm), factors, routes)
    check_gradient("what the first step sees", lambda: rollout.loss(lm), [start.requires_grad_()], routes)

    print(f"loss after three steps: {rollout.loss(lm).item():.2f}; after 30 updates on the loss of")
    reached, ways = {}, {"one step": (1, False), "three steps, cut": (3, True), "three steps": (3, False)}
    for name, (steps, cut) in ways.items():
        lm = base.with_adapter(ADAPTER)  # one base carries as many as we like
        optimizer = torch.optim.Adam([p for p in lm.transformer.parameters() if p.requires_grad], lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            rollout.loss(lm, steps, cut=cut).backward()
            optimizer.step()
        reached[name] = rollout.loss(lm).item()
        print(f"  {name}: {reached[name]:.2f}")
    assert reached["three steps"] == min(reached.values())


if __name__ == "__main__":
    main(sys.argv[1])
