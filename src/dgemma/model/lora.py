"""Adapters: stacks some of whose weights carry a low-rank addition.

An adapted stack is a new tree of modules over the same tensors: several adapters of one base live at
once, share its memory, and the base goes on working without them.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from dgemma.errors import InputError, suggestion
from dgemma.model.lora_weight import LoraBank, LoraMatrix, LowRank, merged_weight
from dgemma.model.stack import Stack
from dgemma.model.weight import Matrix, MatrixBank, PlainBank, PlainMatrix

PARTS = ("attention", "mlp", "experts", "self_conditioning", "router")
Module = TypeVar("Module", bound=nn.Module)
Change = Callable[[str, nn.Module], nn.Module | None]


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What a new adapter adapts, and how much of it.

    rank, alpha: of every linear; the addition is scaled by alpha / rank.
    expert_rank, expert_alpha: the same for each expert. There are many, so their rank is lower; the
      defaults scale both by 2.
    targets: parts of the stack out of `PARTS`. The router stays as it is unless named. A part that is
      not named, or whose rank is 0, is left alone.
    """

    rank: int = 16
    expert_rank: int = 4
    alpha: float = 32.0
    expert_alpha: float = 8.0
    targets: tuple[str, ...] = PARTS[:4]

    def __post_init__(self) -> None:
        for name in ("rank", "expert_rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InputError(f"{name} is {value!r}; it must be a whole number of at least 0.")
        for name in ("alpha", "expert_alpha"):
            value = getattr(self, name)
            good = isinstance(value, int | float) and not isinstance(value, bool)
            if not good or not 0 < value < math.inf:
                raise InputError(f"{name} is {value!r}; it must be a number above 0.")
        if not isinstance(self.targets, tuple):
            raise InputError(f"targets is {self.targets!r}; it must be a tuple out of {', '.join(PARTS)}.")
        for part in self.targets:
            if part == "embedding":
                raise InputError(
                    "targets has 'embedding'; it is read, mixed and tied to the vocabulary, so it takes no "
                    f"adapter. Choose out of {', '.join(PARTS)}."
                )
            if part not in PARTS:
                raise InputError(
                    f"targets has {part!r}, which is no part of the stack{suggestion(str(part), PARTS)} "
                    f"Parts: {', '.join(PARTS)}."
                )
        if not any(self.rank_of(part) for part in self.targets):
            raise InputError(
                f"targets is {self.targets!r} with rank {self.rank} and expert_rank {self.expert_rank}, "
                "which adapts nothing; name a part whose rank is above 0."
            )

    def rank_of(self, part: str) -> int:
        return self.expert_rank if part == "experts" else self.rank

    def alpha_of(self, part: str) -> float:
        return self.expert_alpha if part == "experts" else self.alpha


def attach(stack: Stack, settings: LoraSettings, *, seed: int, dtype: torch.dtype | None = None) -> Stack:
    """The stack with a fresh adapter, which changes nothing until it is trained.

    Only the factors require gradients. `seed` and a weight's path give its factors, whatever else is
    adapted. dtype: of the factors; None for the model's. Products run in the model's in any case.
    """
    added = {}
    for path, weight in _weights(stack).items():
        part = _part(path)
        rank = settings.rank_of(part) if part in settings.targets else 0
        if rank:
            added[path] = _fresh(weight, rank, settings.alpha_of(part), f"{seed}:{path}")
    return adapted(stack, added, dtype=dtype)


def adapted(
    stack: Stack,
    added: Mapping[str, LowRank],
    *,
    dtype: torch.dtype | None = None,
    trainable: bool = True,
) -> Stack:
    """The stack with the additions that `added` names by the path of their weight."""
    if has_adapter(stack):
        raise InputError("this stack has an adapter already; detach it first, or attach to its base.")

    def wrap(path: str, module: nn.Module) -> nn.Module | None:
        if path not in added:
            return None
        factors = added[path].to(_device(module), dtype or stack.embedding.dtype)
        if isinstance(module, MatrixBank):
            return LoraBank(_frozen_twin(module), factors, trainable=trainable)
        assert isinstance(module, Matrix), path
        return LoraMatrix(_frozen_twin(module), factors, trainable=trainable)

    return _frozen_twin(stack, wrap)


def adapted_weights(stack: Stack) -> dict[str, LoraMatrix | LoraBank]:
    """The weights that carry an addition, by path."""
    return {p: w for p, w in _weights(stack).items() if isinstance(w, LoraMatrix | LoraBank)}


def has_adapter(stack: Stack) -> bool:
    return bool(adapted_weights(stack))


def lora_parameters(stack: Stack) -> dict[str, nn.Parameter]:
    """The factors by name, such as `layers.0.attention.query.down`."""
    found = adapted_weights(stack).items()
    return {f"{path}.{name}": getattr(weight, name) for path, weight in found for name in ("down", "up")}


def detach(stack: Stack) -> Stack:
    """The base alone, over the same tensors."""
    return _frozen_twin(stack, lambda _, m: m.base if isinstance(m, LoraMatrix | LoraBank) else None)


def merged(stack: Stack) -> Stack:
    """A stack of plain weights with the adapter added in; what is not adapted is shared.

    `stack` stays as it is, so that `detach` undoes this exactly.
    """

    def merge(path: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, LoraMatrix | LoraBank):
            return None
        if not isinstance(module.base, PlainMatrix | PlainBank):
            raise InputError(
                f"{path} is a {type(module.base).__name__}; only plain weights can be merged. Load the "
                "base unquantized and merge there."
            )
        twin: PlainMatrix | PlainBank = _frozen_twin(module.base)
        added = LowRank(down=module.down, up=module.up, alpha=module.alpha)
        twin.weight = nn.Parameter(merged_weight(module.base.weight, added), requires_grad=False)
        return twin

    return _frozen_twin(stack, merge)


def _weights(stack: Stack) -> dict[str, Matrix | MatrixBank]:
    """Every weight by path; of an adapted one the wrapper, not what it wraps."""
    found = {p: m for p, m in stack.named_modules() if isinstance(m, Matrix | MatrixBank)}
    return {path: weight for path, weight in found.items() if path.rpartition(".")[0] not in found}


def _part(path: str) -> str:
    names = path.split(".")
    return names[2] if names[0] == "layers" else names[0]


def _frozen_twin(module: Module, change: Change = lambda path, module: None, path: str = "") -> Module:
    """The same module over the same tensors, none of which requires gradients.

    Where `change` gives a module for a path below, that one stands in its place.
    """
    twin = copy.copy(module)
    twin._parameters = {name: _frozen(tensor) for name, tensor in module._parameters.items()}
    twin._buffers = dict(module._buffers)
    twin._modules = {}
    for name, child in module._modules.items():
        if child is None:
            twin._modules[name] = None
            continue
        at = f"{path}.{name}" if path else name
        changed = change(at, child)
        twin._modules[name] = _frozen_twin(child, change, at) if changed is None else changed
    return twin


def _frozen(tensor: nn.Parameter | None) -> nn.Parameter | None:
    if tensor is None or not tensor.requires_grad:
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)  # another handle on the same memory


def _fresh(weight: Matrix | MatrixBank, rank: int, alpha: float, name: str) -> LowRank:
    experts = (weight.num_experts,) if isinstance(weight, MatrixBank) else ()
    down_shape, up_shape = (*experts, rank, weight.in_features), (*experts, weight.out_features, rank)
    if _device(weight).type == "meta":  # shapes alone are wanted: 26 B are counted this way
        return LowRank(
            down=torch.empty(down_shape, device="meta"), up=torch.empty(up_shape, device="meta"), alpha=alpha
        )
    # Seeded by name, so that no factor depends on the order, and made on the CPU, so that none depends
    # on the device.
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    down = torch.randn(down_shape, generator=torch.Generator().manual_seed(seed))
    return LowRank(down=down * weight.in_features**-0.5, up=torch.zeros(up_shape), alpha=alpha)


def _device(weight: nn.Module) -> torch.device:
    return next(chain(weight.parameters(), weight.buffers())).device
