"""Muon: momentum whose matrices are brought to the nearest orthogonal one before they are added.

All directions of a matrix then move equally far, the rare ones too (Jordan et al. 2024). torch has it for
single matrices; here those of one shape are taken together, and banks of expert matrices with them: a small
model has a hundred small matrices, and time goes into calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# The quintic with the steepest slope at zero: singular values end between 0.7 and 1.2, which is near enough.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
# Makes an update's size that of Adam's, so that both take one learning rate (Liu et al. 2025).
_ADAM_SIZE = 0.2


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized; decoupled weight decay. Parameters are matrices or banks of them."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shape = parameter.shape[-2:]
                    alike[(min(shape), max(shape))].append(parameter)
            for parameters in alike.values():
                self._step_alike(parameters, group)

    def _step_alike(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        wide = [self._direction(p, group["momentum"]) for p in parameters]
        moved = orthogonalize(torch.cat(wide)).split([len(part) for part in wide])
        for parameter, part in zip(parameters, moved, strict=True):
            rows, columns = parameter.shape[-2:]
            update = (part.mT if rows > columns else part).reshape(parameter.shape)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * _ADAM_SIZE * max(rows, columns) ** 0.5)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """[matrices, short side, long side]"""
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(grad)
        state["momentum"].lerp_(grad, 1 - momentum)
        rows, columns = parameter.shape[-2:]
        direction = grad.lerp(state["momentum"], momentum).reshape(-1, rows, columns)
        return direction.mT if rows > columns else direction


def orthogonalize(matrices: Tensor) -> Tensor:
    """The orthogonal factor of each of [n, short, long], roughly: Newton-Schulz iterations in bfloat16."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)
