"""Trained weights and their float32 masters, AdamW and Muon over them, and the learning rate schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.checkpoint.names import tensor_specs
from dgemma.errors import CheckpointError, InputError
from dgemma.machine import has_fast_bf16
from dgemma.model.transformer import Transformer
from dgemma.training.divided import own, own_rows, whole
from dgemma.training.recipe import OptimizerRecipe

# `tensor_specs` calls the dense MLP of a layer "shared_mlp"; recipes and adapters call it "mlp".
_PARTS = {"shared_mlp": "mlp"}
# Their rows are used one by one (lookup, routing scores), so orthogonalizing the matrix has no meaning.
_NOT_ORTHOGONALIZED = ("embedding.", ".router.")
_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "momentum")
# The quintic with the steepest slope at zero. Singular values end between 0.7 and 1.2, which suffices.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_EPS = 1e-7
# Scales an update to the size of Adam's, so that both use one learning rate (Liu et al. 2025).
_ADAM_SIZE = 0.2


def choose_trained(stack: Transformer, freeze: Iterable[str]) -> dict[str, nn.Parameter]:
    """All parameters except those of the frozen parts, by path. Only these require gradients."""
    frozen = set(freeze)
    part_of = {spec.path: _PARTS.get(spec.part, spec.part) for spec in tensor_specs(stack.config)}
    chosen = {}
    for path, parameter in stack.named_parameters():
        # The vision tower has no part: training is on text, and leaves it as it is.
        parameter.requires_grad_(path in part_of and part_of[path] not in frozen)
        if parameter.requires_grad:
            chosen[path] = parameter
    if not chosen:
        raise InputError.about("freeze", f"is {sorted(frozen)}, which leaves nothing to train; freeze less.")
    return chosen


class TrainedWeights:
    """Parameters by name, with float32 master weights where a parameter has another dtype.

    Rounding would lose a small change to a bf16 number; the master keeps it. Gradients are accumulated in
    float32 as well, over all forwards of a step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def collect_gradients(self) -> None:
        """Move the gradients of a backward pass to the masters."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            wide = parameter.grad.float()
            master.grad = wide if master.grad is None else master.grad.add_(wide)
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the parameters, rounded to their dtype."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    @torch.no_grad()
    def restore(self, masters: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(masters[name])
        self.publish()


class Optimizer:
    """Adam over the masters, or Muon over their matrices and Adam over the rest.

    The state is keyed by parameter name, so that it can be written without pickle.
    """

    def __init__(self, weights: TrainedWeights, recipe: OptimizerRecipe) -> None:
        self._weights = weights
        self._clip = recipe.clip
        self._optimizer_of: dict[str, torch.optim.Optimizer] = {}
        muon, matrices, vectors = [], [], []
        for name, master in weights.masters.items():
            if recipe.kind == "muon" and is_orthogonalized(name, master):
                muon.append(name)
            elif master.ndim > 1:
                matrices.append(name)
            else:
                vectors.append(name)
        # Only matrices decay: the size of norm weights and scales has a meaning.
        groups = [
            {"params": [weights.masters[name] for name in names], "weight_decay": decay}
            for names, decay in ((matrices, recipe.weight_decay), (vectors, 0.0))
            if names
        ]
        if groups:
            adam = torch.optim.AdamW(
                groups, lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps, fused=True
            )
            self._optimizer_of.update(dict.fromkeys([*matrices, *vectors], adam))
        if muon:
            by_muon = Muon(
                [weights.masters[name] for name in muon],
                lr=recipe.learning_rate,
                momentum=recipe.momentum,
                weight_decay=recipe.weight_decay,
            )
            self._optimizer_of.update(dict.fromkeys(muon, by_muon))

    def step(self, learning_rate: float) -> float:
        """Update the weights with the collected gradients -> the gradient norm before clipping.

        If the norm is not finite, the weights stay unchanged.
        """
        masters = list(self._weights.masters.values())
        limit = float("inf") if self._clip is None else self._clip
        norm = float(torch.nn.utils.clip_grad_norm_(masters, limit))
        finite = norm == norm and norm != float("inf")
        for optimizer in dict.fromkeys(self._optimizer_of.values()):
            if finite:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if finite:
            self._weights.publish()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name, for a file."""
        found = {}
        for name, master in self._weights.masters.items():
            found[f"master.{name}"] = master.detach()
            for key, value in self._optimizer_of[name].state.get(master, {}).items():
                found[f"{key}.{name}"] = value
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, master in self._weights.masters.items():
            stored = tensors.get(f"master.{name}")
            if stored is None or stored.shape != master.shape:
                found = "nothing" if stored is None else f"shape {list(stored.shape)}"
                raise CheckpointError(
                    f"the run's state has {found} for {name}; it takes shape {list(master.shape)}. The state "
                    "is of another model: give another out."
                )
        self._weights.restore({name: tensors[f"master.{name}"] for name in self._weights.masters})
        for name, master in self._weights.masters.items():
            state = {key: tensors[f"{key}.{name}"] for key in _STATE_KEYS if f"{key}.{name}" in tensors}
            if state:
                self._optimizer_of[name].state[master] = {
                    key: value.to(master.device) for key, value in state.items()
                }


def state_bytes(weights: TrainedWeights, recipe: OptimizerRecipe) -> int:
    """Bytes of the optimizer state beside the masters: one moment for Muon, two for Adam."""
    return sum(
        master.nbytes * (1 if recipe.kind == "muon" and is_orthogonalized(name, master) else 2)
        for name, master in weights.masters.items()
    )


def is_orthogonalized(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates this parameter, if the recipe chooses Muon."""
    return parameter.ndim > 1 and not any(part in name for part in _NOT_ORTHOGONALIZED)


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalized Nesterov momentum with decoupled weight decay.

    Parameters are matrices, or stacks of matrices such as expert weights.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shape = parameter.shape[-2:]
                    by_shape[(min(shape), max(shape))].append(parameter)
            for parameters in by_shape.values():
                self._step_same_shape(parameters, group)

    def _step_same_shape(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        wide = [self._direction(p, group["momentum"]) for p in parameters]
        moved = orthogonalize(torch.cat(wide)).split([len(part) for part in wide])
        for parameter, part in zip(parameters, moved, strict=True):
            rows, columns = parameter.shape[-2:]
            update = part.mT if rows > columns else part
            if parameter.ndim == 2:
                update = update[0][own_rows(parameter)]
            held = own(parameter)
            held.mul_(1 - group["lr"] * group["weight_decay"])
            held.add_(update, alpha=-group["lr"] * _ADAM_SIZE * max(rows, columns) ** 0.5)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """The Nesterov direction [matrices, short side, long side]; updates the momentum.

        Of a divided matrix the whole, on every rank; of a divided stack of them this rank's own matrices.
        """
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(grad)
        state["momentum"].lerp_(grad, 1 - momentum)
        rows, columns = parameter.shape[-2:]
        direction = grad.lerp(state["momentum"], momentum)
        direction = (whole(direction) if parameter.ndim == 2 else own(direction)).reshape(-1, rows, columns)
        return direction.mT if rows > columns else direction


def orthogonalize(matrices: Tensor) -> Tensor:
    """The approximate orthogonal factor of each of [n, short, long]: Newton-Schulz iterations.

    In bfloat16, which suffices; in float32 on a processor that imitates bfloat16, where that is faster.
    """
    a, b, c = _NEWTON_SCHULZ
    is_imitated = matrices.device.type == "cpu" and not has_fast_bf16()
    x = matrices if is_imitated else matrices.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def learning_rate(step: int, num_steps: int, recipe: OptimizerRecipe) -> float:
    """The learning rate of step `step`, counted from 0."""
    num_warmup = math.ceil(recipe.warmup * num_steps)
    if step < num_warmup:
        return recipe.learning_rate * (step + 1) / num_warmup
    if recipe.decay == "constant":
        return recipe.learning_rate
    # From the peak right after the warm-up to `final` at the last step.
    done = (step - num_warmup) / max(1, num_steps - 1 - num_warmup)
    share = (1 + math.cos(math.pi * done)) / 2 if recipe.decay == "cosine" else 1 - done
    return recipe.learning_rate * (recipe.final + (1 - recipe.final) * share)
