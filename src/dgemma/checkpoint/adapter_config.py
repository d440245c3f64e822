"""`adapter_config.json` of an adapter in PEFT's layout: reading, checking and writing.

Names in it are released module names (`model.decoder.layers.0.self_attn.q_proj`), or for experts
parameter names (`model.decoder.layers.0.experts.down_proj`), or the ends of such names. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.errors import CheckpointError

_LARGEST_RANK = 1 << 20
_LARGEST_ALPHA = 1e9
# Fields that do not affect what a trained adapter computes.
_IGNORED_FIELDS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "lora_dropout",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
}  # fmt: skip
_READ_FIELDS = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters",
    "use_rslora", "exclude_modules", "layers_to_transform",
}  # fmt: skip
# Initializations that do not change the base weights.
_SUPPORTED_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_PLAIN_NAME = re.compile(r"\^?[A-Za-z0-9_]+(\\?\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Ranks, scales and targets of an adapter."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool  # scaled by alpha / sqrt(rank)
    # None: the modules that the file has, because the configuration has a rule instead of names.
    modules: tuple[str, ...] | None
    parameters: tuple[str, ...]

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], file: Path) -> AdapterConfig:
        def refuse(name: str, rule: str) -> CheckpointError:
            return CheckpointError(f"{file}: {name} is {raw.get(name)!r}; {rule}.")

        if raw.get("peft_type") != "LORA":
            raise refuse("peft_type", "dgemma reads LORA adapters only")
        if raw.get("bias", "none") != "none":
            raise refuse("bias", "dgemma's weights have none, so it must be 'none'")
        if raw.get("init_lora_weights", True) not in _SUPPORTED_INITS:
            raise refuse("init_lora_weights", "such a start changes the base too. Convert it in PEFT")
        for name, value in raw.items():
            # An unknown field may change the meaning of the others.
            if name not in _IGNORED_FIELDS | _READ_FIELDS | {"bias", "init_lora_weights"} and value:
                raise refuse(name, "dgemma has no such feature, so it must be absent, null or false")
        modules, parameters = raw.get("target_modules") or [], raw.get("target_parameters") or []
        for name, value in (("target_modules", modules), ("target_parameters", parameters)):
            by_rule = name == "target_modules" and isinstance(value, str)
            if not by_rule and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
                raise refuse(name, "it must be a list of names")
        partly = raw.get("exclude_modules") or raw.get("layers_to_transform") is not None
        if not _is_rank(raw.get("r")):
            raise refuse("r", "it must be a whole number above 0")
        if not _is_alpha(raw.get("lora_alpha")):
            raise refuse("lora_alpha", "it must be a number")
        for name, good in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha)):
            pattern = raw.get(name) or {}
            if not isinstance(pattern, dict) or not all(good(value) for value in pattern.values()):
                raise refuse(name, "it must map names to numbers")
            for key in pattern:
                # Not evaluated: a hostile regular expression can run for years.
                if not _PLAIN_NAME.fullmatch(key):
                    raise refuse(name, f"its key {key!r} is a rule. Write the names out")
        return cls(
            rank=raw["r"],
            alpha=float(raw["lora_alpha"]),
            rank_pattern=raw.get("rank_pattern") or {},
            alpha_pattern={k: float(v) for k, v in (raw.get("alpha_pattern") or {}).items()},
            rank_stabilized=bool(raw.get("use_rslora")),
            modules=None if partly or isinstance(modules, str) else tuple(modules),
            parameters=tuple(parameters),
        )

    def to_json(self, base_name: str | None) -> dict[str, Any]:
        assert self.modules is not None
        return {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": base_name,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": _as_integer(self.alpha),
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": {k: _as_integer(v) for k, v in self.alpha_pattern.items()},
            "use_rslora": self.rank_stabilized,
            "bias": "none",
            "lora_dropout": 0.0,
            "target_modules": list(self.modules),
            "target_parameters": list(self.parameters),
        }

    def rank_of(self, target: str) -> int:
        return int(_first_match(self.rank_pattern, target, self.rank))

    def alpha_of(self, target: str) -> float:
        """The alpha of this target, for a scale of alpha / rank."""
        alpha = _first_match(self.alpha_pattern, target, self.alpha)
        return alpha * math.sqrt(self.rank_of(target)) if self.rank_stabilized else alpha

    def names(self, target: str, *, is_parameter: bool) -> bool:
        """Whether the configuration adapts this module or parameter."""
        if is_parameter:
            return _is_named(target, self.parameters)
        return self.modules is None or _is_named(target, self.modules)


def patterns(values: Mapping[str, float], default: float) -> dict[str, Any]:
    """Values that differ from the default: by kind of module if all of a kind agree, else by full name."""
    by_kind: dict[str, set[float]] = {}
    for target, value in values.items():
        by_kind.setdefault(_kind(target), set()).add(value)
    found: dict[str, Any] = {}
    for target, value in values.items():
        if value != default:
            found[_kind(target) if len(by_kind[_kind(target)]) == 1 else target] = value
    return found


def _kind(target: str) -> str:
    return ".".join(target.split(".")[-2:])


def _first_match(pattern: Mapping[str, float], target: str, otherwise: float) -> float:
    for key, value in pattern.items():
        plain = key.replace("\\", "")
        if _is_named(target, (plain,)) or plain == f"^{target}":
            return value
    return otherwise


def _is_named(target: str, names: Iterable[str]) -> bool:
    return any(target == name or target.endswith(f".{name}") for name in names)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_RANK


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_ALPHA


def _as_integer(value: float) -> float:
    return int(value) if float(value).is_integer() else value  # other readers expect integers
