"""What is trained: the parameters a forward computes with, and their float32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dgemma.checkpoint.names import tensor_specs
from dgemma.errors import InputError
from dgemma.model.stack import Stack

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
