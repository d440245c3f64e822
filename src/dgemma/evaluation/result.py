"""What became of one example: its scores, and what they cost. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from dgemma.events import Answer


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the model wrote, in figures; and its text, to look at."""

    text: str
    finish_reason: str
    decode: str
    tokens: int
    forwards: int
    steps: tuple[int, ...]  # denoise forwards per canvas
    prompt_tokens: int
    seconds: float  # of its batch, divided by the rows of the batch

    @classmethod
    def of(cls, answer: Answer, seconds: float) -> Written:
        return cls(
            text=answer.text,
            finish_reason=str(answer.finish_reason),
            decode=answer.decode,
            tokens=len(answer.tokens),
            forwards=answer.forwards,
            steps=answer.steps,
            prompt_tokens=answer.prompt_tokens,
            seconds=seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """One example. A failed one has a reason and no scores, and an answer if it got so far."""

    number: int  # of the example, from 0
    mark: str  # the same for the same example, see `mark_of`
    seed: int
    groups: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    written: Written | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Result:
        """What `to_json` gave; a KeyError, TypeError or ValueError for anything else."""
        written = raw["written"]
        if written is not None:
            written = Written(**{**written, "steps": tuple(written["steps"])})
        return cls(
            number=int(raw["number"]),
            mark=str(raw["mark"]),
            seed=int(raw["seed"]),
            groups=tuple(raw["groups"]),
            scores={str(name): float(value) for name, value in dict(raw["scores"]).items()},
            failure=raw["failure"],
            written=written,
        )


def mark_of(example: Any, prompt: Any) -> str:
    """Tells examples apart: a digest of the prompt, and of the example if it is plain data."""
    told = [_as_json(example), _as_json(prompt)]
    return hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]


def seed_of(seed: int, *what: object) -> int:
    """The seed of one example: depends on the run's seed and `what` alone. Short enough to be typed again."""
    told = "/".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:4], "big")


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=_fields)
    except (TypeError, ValueError, RecursionError):
        return ""  # objects whose spelling may change from run to run


def _fields(value: Any) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(f"a {type(value).__name__} is not plain data")
