"""Send gradients through three refinement steps, check them, and train on what the last step says.

Tokens are discrete, but what a step tells the next one is not: its soft embedding. A step is plain tensor
code, so the last step's loss reaches every weight and every step before it; nothing has to be written for it.

python examples/unrolled_steps.py my-model
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import dgemma

TEXT = "salty because rivers carry salt from the land, and the sun takes only water away."
ADAPTER = dgemma.LoraSettings(targets=("self_conditioning", "experts"))
TEMPERATURES = dgemma.Sampler().schedule(torch.tensor([3, 2, 1]), 3).tolist()  # as at inference


@dataclass(frozen=True)
class Scene:
    cache: dgemma.KVCache  # the prompt
    canvas: Tensor  # [1, canvas] noise
    target: Tensor  # [canvas]
    start: Tensor  # [1, canvas, hidden] the soft embedding the first step sees


def set_scene(lm: dgemma.LanguageModel) -> Scene:
    torch.manual_seed(0)
    length, cache = lm.config.canvas_len, lm.new_cache()
    canvas = torch.randint(lm.config.vocab_size, (1, length))
    target = torch.tensor((lm.tokenizer.encode(TEXT) + [lm.tokenizer.eos_id] * length)[:length])
    with torch.no_grad():
        lm.encode(torch.tensor([[lm.tokenizer.bos_id, *lm.tokenizer.encode("The sea is")]]), cache)
        # A first look. Not zeros: there the norm in front of self-conditioning is steep and bends at once.
        start = lm.soft_embedding(lm.logits(lm.denoise(canvas, cache)) / TEMPERATURES[0])
    return Scene(cache, canvas, target, start)


def loss_after(steps: int, lm: dgemma.LanguageModel, scene: Scene, *, cut: bool = False) -> Tensor:
    """Cross-entropy of the target behind so many steps; `cut` keeps gradients within the last one."""
    soft = scene.start
    for temperature in TEMPERATURES[-steps:]:
        logits = lm.logits(lm.denoise(scene.canvas, scene.cache, soft))
        soft = lm.soft_embedding(logits / temperature)
        soft = soft.detach() if cut else soft
    return F.cross_entropy(logits[0], scene.target)


def check_gradient(
    name: str, loss: Callable[[], Tensor], moved: Sequence[Tensor], routes: list[Tensor]
) -> None:
    """Compare the gradient's length with the slope that is measured along it.

    A token visits the experts with its largest router scores. Where a move swaps two of them the loss jumps,
    and no derivative knows of a jump. So the move must be small, but its effect large against fp32's
    rounding (1e-6): along the gradient a loss changes most for its way. Both ends are asked for their routes.
    """
    gradient = torch.autograd.grad(loss(), moved)
    length = torch.stack([part.norm() for part in gradient]).norm().item()
    way = 1e-3 / length  # the loss is to change by 0.001 to either side
    seen = []
    with torch.no_grad():
        for distance in (way, -2 * way, way):  # there, to the other side, and back
            for tensor, part in zip(moved, gradient, strict=True):
                tensor += distance / length * part
            routes.clear()
            seen.append((loss().item(), torch.cat(routes)))
    (up, routes_up), (down, routes_down), _ = seen
    assert torch.equal(routes_up, routes_down), "a token changed its experts; take a smaller move"
    slope = (up - down) / (2 * way)
    print(f"{name}: gradient {length:.4f}, measured {slope:.4f}, off by {abs(slope / length - 1):.2%}")
    assert abs(slope / length - 1) < 0.02


def train(lm: dgemma.LanguageModel, loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.Adam([p for p in lm.stack.parameters() if p.requires_grad], lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def main(path: str) -> None:
    base = dgemma.load(path, dtype="float32")
    scene = set_scene(base)

    lm = base.with_adapter(ADAPTER)  # one base, as many adapters as we like
    routes: list[Tensor] = []
    for layer in lm.stack.layers:
        layer.router.register_forward_hook(
            lambda _, __, result: routes.append(result[1].sort().values.flatten())
        )
    factors = [p for p in lm.stack.parameters() if p.requires_grad]
    check_gradient(
        "adapter of self-conditioning and experts", lambda: loss_after(3, lm, scene), factors, routes
    )
    scene.start.requires_grad_()
    check_gradient("what the first step sees", lambda: loss_after(3, lm, scene), [scene.start], routes)
    scene.start.requires_grad_(False)

    print(f"loss behind three steps, before training: {loss_after(3, lm, scene).item():.2f}")
    ways = {
        "one step": lambda lm: loss_after(1, lm, scene),
        "three steps, gradients in the last": lambda lm: loss_after(3, lm, scene, cut=True),
        "three steps, gradients in all": lambda lm: loss_after(3, lm, scene),
    }
    found = []
    for name, loss in ways.items():
        lm = base.with_adapter(ADAPTER)
        train(lm, lambda lm=lm, loss=loss: loss(lm))
        found.append(loss_after(3, lm, scene).item())
        print(f"  after 30 updates on {name}: {found[-1]:.2f}")
    assert found[2] < min(found[:2])


if __name__ == "__main__":
    main(sys.argv[1])
