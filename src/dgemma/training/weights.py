"""What is trained: the parameters a forward computes with, and their float32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dgemma.checkpoint.names import tensor_specs
from dgemma.errors import CheckpointError, InputError
from dgemma.model.stack import Stack
from dgemma.training.recipe import OptimizerRecipe

# A census counts the dense MLP of a layer as "shared_mlp"; recipes say "mlp", as adapters do.
_PARTS = {"shared_mlp": "mlp"}


def choose_trained(stack: Stack, freeze: Iterable[str]) -> dict[str, nn.Parameter]:
    """Every parameter but those of the frozen parts, by path; only these require gradients."""
    frozen = set(freeze)
    part_of = {spec.path: _PARTS.get(spec.part, spec.part) for spec in tensor_specs(stack.config)}
    chosen = {}
    for path, parameter in stack.named_parameters():
        parameter.requires_grad_(part_of[path] not in frozen)
        if parameter.requires_grad:
            chosen[path] = parameter
    if not chosen:
        raise InputError(f"freeze is {sorted(frozen)}, which leaves nothing to train; freeze less.")
    return chosen


class TrainedWeights:
    """Parameters by name, with float32 masters where they compute in fewer bits.

    A small change to a bf16 number is lost by rounding; the master keeps it. Gradients are added up in
    float32 too, however many forwards make a step.
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
        """Move what a backward pass left to the masters."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            wide = parameter.grad.float()
            master.grad = wide if master.grad is None else master.grad.add_(wide)
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into what the forward computes with."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    @torch.no_grad()
    def restore(self, masters: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(masters[name])
        self.publish()


class Optimizer:
    """Adam over the masters. Its state is named by parameter, so that it can be written without pickle."""

    def __init__(self, weights: TrainedWeights, recipe: OptimizerRecipe) -> None:
        self._weights = weights
        self._clip = recipe.clip
        masters = weights.masters.values()
        # Norm weights and scales have a size of their own to keep: only matrices decay.
        groups = [
            {"params": [p for p in masters if p.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in masters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.eps,
            fused=True,
        )

    def step(self, learning_rate: float) -> float:
        """Change the weights by the gradients collected -> the gradients' norm before clipping.

        Gradients that are not finite change nothing.
        """
        masters = list(self._weights.masters.values())
        limit = float("inf") if self._clip is None else self._clip
        norm = float(torch.nn.utils.clip_grad_norm_(masters, limit))
        if norm == norm and norm != float("inf"):
            for group in self._adam.param_groups:
                group["lr"] = learning_rate
            self._adam.step()
            self._weights.publish()
        self._adam.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name, for a file."""
        found = {}
        for name, master in self._weights.masters.items():
            found[f"master.{name}"] = master.detach()
            for key, value in self._adam.state.get(master, {}).items():
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
            keys = ("step", "exp_avg", "exp_avg_sq")
            held = {key: tensors[f"{key}.{name}"] for key in keys if f"{key}.{name}" in tensors}
            if held:
                self._adam.state[master] = {key: value.to(master.device) for key, value in held.items()}
