"""The rule by which gradients change weights, with a state that can be written and read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dgemma.errors import CheckpointError
from dgemma.training.muon import Muon
from dgemma.training.recipe import OptimizerRecipe
from dgemma.training.weights import TrainedWeights

# Their rows are looked up or chosen one by one, so there is no matrix to speak of.
_ROWS_APART = ("embedding.", ".router.")
_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "momentum")


class Optimizer:
    """Adam over the masters, or Muon over their matrices and Adam over the rest.

    The state is named by parameter, so that it can be written without pickle.
    """

    def __init__(self, weights: TrainedWeights, recipe: OptimizerRecipe) -> None:
        self._weights = weights
        self._clip = recipe.clip
        self._owner: dict[str, torch.optim.Optimizer] = {}
        muon, matrices, vectors = [], [], []
        for name, master in weights.masters.items():
            if recipe.kind == "muon" and is_orthogonalized(name, master):
                muon.append(name)
            elif master.ndim > 1:
                matrices.append(name)
            else:
                vectors.append(name)
        # Norm weights and scales have a size of their own to keep: only matrices decay.
        groups = [
            {"params": [weights.masters[name] for name in names], "weight_decay": decay}
            for names, decay in ((matrices, recipe.weight_decay), (vectors, 0.0))
            if names
        ]
        if groups:
            adam = torch.optim.AdamW(
                groups, lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps, fused=True
            )
            self._owner.update(dict.fromkeys([*matrices, *vectors], adam))
        if muon:
            by_muon = Muon(
                [weights.masters[name] for name in muon],
                lr=recipe.learning_rate,
                momentum=recipe.momentum,
                weight_decay=recipe.weight_decay,
            )
            self._owner.update(dict.fromkeys(muon, by_muon))

    def step(self, learning_rate: float) -> float:
        """Change the weights by the gradients collected -> the gradients' norm before clipping.

        Gradients that are not finite change nothing.
        """
        masters = list(self._weights.masters.values())
        limit = float("inf") if self._clip is None else self._clip
        norm = float(torch.nn.utils.clip_grad_norm_(masters, limit))
        finite = norm == norm and norm != float("inf")
        for rule in dict.fromkeys(self._owner.values()):
            if finite:
                for group in rule.param_groups:
                    group["lr"] = learning_rate
                rule.step()
            rule.zero_grad(set_to_none=True)
        if finite:
            self._weights.publish()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name, for a file."""
        found = {}
        for name, master in self._weights.masters.items():
            found[f"master.{name}"] = master.detach()
            for key, value in self._owner[name].state.get(master, {}).items():
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
            held = {key: tensors[f"{key}.{name}"] for key in _STATE_KEYS if f"{key}.{name}" in tensors}
            if held:
                self._owner[name].state[master] = {
                    key: value.to(master.device) for key, value in held.items()
                }


def state_bytes(weights: TrainedWeights, recipe: OptimizerRecipe) -> int:
    """What the rule keeps beside the masters: one moment of Muon's, two of Adam's."""
    return sum(
        master.nbytes * (1 if recipe.kind == "muon" and is_orthogonalized(name, master) else 2)
        for name, master in weights.masters.items()
    )


def is_orthogonalized(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon takes this parameter, if it is asked for."""
    return parameter.ndim > 1 and not any(part in name for part in _ROWS_APART)
