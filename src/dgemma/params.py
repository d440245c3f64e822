"""What a caller may ask of a generation: one frozen, checked set of options. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dgemma.errors import InputError, suggestion

Decode = Literal["diffuse", "causal", "auto"]
Acceptance = Literal["entropy_bound", "confidence", "fixed"]

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_LOGPROBS = 20
MAX_TOP_K = 1024
MAX_STEPS = 1024

# Each preset names a trade; what it does not name stays as the checkpoint has it.
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"max_denoising_steps": 24, "entropy_bound": 0.3, "confidence_threshold": 0.02},
    "balanced": {},
    "thorough": {
        "max_denoising_steps": 96,
        "entropy_bound": 0.05,
        "stability_threshold": 2,
        "confidence_threshold": 0.002,
    },
}


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """Options of one generation. `GenerationParams.make(...)` refuses unknown names with a suggestion."""

    max_tokens: int | None = None
    """Most tokens to write; None: 1,024, or what the context leaves if that is less."""
    seed: int | None = None
    """The same seed gives the same text; None draws one, which the answer names."""
    temperature: float = 1.0
    """Scales both ends of the schedule (1: as the checkpoint has it); 0 draws the likeliest word."""
    decode: Decode = "diffuse"
    """"diffuse" refines canvases, "causal" writes left to right, "auto" takes the cheaper one."""
    max_denoising_steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    acceptance: Acceptance = "entropy_bound"
    """Which positions keep their draw: the reference's rule, a probability, or so many per step."""
    entropy_bound: float = 0.1
    min_confidence: float = 0.9
    """With acceptance "confidence": the least probability of a guess that is kept."""
    accept_per_step: int = 16
    """With acceptance "fixed": positions kept per step."""
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    top_k: int | None = None
    """Draw among the k likeliest words only. Costs a second walk over the vocabulary."""
    top_p: float | None = None
    """Draw among the likeliest words that together reach p (searched among the 1,024 likeliest). Costs
    a second walk over the vocabulary."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    end_tokens: tuple[int, ...] = (1, 106)
    """Tokens that end the answer, from the checkpoint."""
    ignore_end: bool = False
    """Write on past end tokens, for measurements."""
    deadline_s: float | None = None
    """Seconds until the answer so far is returned, marked as such."""
    logprobs: int | None = None
    """So many likeliest words with their log-probabilities per token of the answer."""

    def __post_init__(self) -> None:
        whole = (
            ("max_tokens", 1, None), ("seed", -(1 << 63), (1 << 64) - 1),
            ("max_denoising_steps", 1, MAX_STEPS), ("accept_per_step", 1, None),
            ("stability_threshold", 0, None), ("top_k", 1, MAX_TOP_K), ("logprobs", 0, MAX_LOGPROBS),
        )  # fmt: skip
        for name, least, most in whole:
            self._check_number(name, int, least, most)
        real = (
            ("temperature", 0.0, 100.0), ("t_min", 0.0, 100.0), ("t_max", 0.0, 100.0),
            ("entropy_bound", 0.0, None), ("min_confidence", 0.0, 1.0), ("confidence_threshold", 0.0, None),
            ("top_p", 0.0, 1.0), ("deadline_s", 0.0, None),
        )  # fmt: skip
        for name, low, high in real:
            self._check_number(name, (int, float), low, high)
        if self.top_p == 0:
            raise InputError("top_p is 0; it must be above 0. For the likeliest word use temperature 0.")
        if self.t_min > self.t_max:
            raise InputError(f"t_min is {self.t_min}, t_max is {self.t_max}; t_min must not be larger.")
        self._check_choice("decode", ("diffuse", "causal", "auto"))
        self._check_choice("acceptance", ("entropy_bound", "confidence", "fixed"))
        self._check_stop()

    @classmethod
    def make(
        cls, defaults: GenerationParams | None = None, *, preset: str | None = None, **options: Any
    ) -> GenerationParams:
        """`defaults`, changed by a preset, changed by `options`; None leaves an option as it is."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise InputError(
                    f"unknown option {name!r}{suggestion(name, known)} Options: {', '.join(known)}."
                )
        if preset is not None and preset not in PRESETS:
            raise InputError(
                f"preset is {preset!r}{suggestion(str(preset), PRESETS)} Presets: {', '.join(PRESETS)}."
            )
        if isinstance(options.get("stop"), str):
            options["stop"] = (options["stop"],)
        elif isinstance(options.get("stop"), list):
            options["stop"] = tuple(options["stop"])
        given = {name: value for name, value in options.items() if value is not None}
        changes = {**PRESETS[preset or "balanced"], **given}
        return replace(defaults or cls(), **changes)

    @classmethod
    def from_generation_config(cls, raw: Mapping[str, Any]) -> GenerationParams:
        """A checkpoint's defaults: `generation_config.json`, where null means ours.

        Its `max_new_tokens` is left out: that is the length of a canvas, not a user's limit.
        """
        nested = raw.get("sampler_config")
        found = {
            name: raw.get(name)
            for name in (
                "max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold",
            )
        }  # fmt: skip
        found["entropy_bound"] = nested.get("entropy_bound") if isinstance(nested, Mapping) else None
        ends = raw.get("eos_token_id")
        if ends is not None:
            found["end_tokens"] = tuple(ends) if isinstance(ends, list) else (ends,)
        return cls.make(**found)

    def _check_number(self, name: str, kind: Any, low: float, high: float | None) -> None:
        value = getattr(self, name)
        if value is None and _may_be_none(name):
            return
        rule = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        what = "a whole number" if kind is int else "a number"
        good = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < low or (high is not None and value > high):
            raise InputError(f"{name} is {value!r}; it must be {what} {rule}.")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise InputError(
                f"{name} is {value!r}{suggestion(str(value), choices)} Choices: {', '.join(choices)}."
            )

    def _check_stop(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise InputError(f"stop is {self.stop!r}; it must be a string or a list of strings.")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InputError(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken.")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_LEN:
                raise InputError(
                    f"stop has a string of {len(text)} characters; give 1 to {MAX_STOP_STRING_LEN}."
                )
        if not _all_whole(self.end_tokens):
            raise InputError(f"end_tokens is {self.end_tokens!r}; it must be whole numbers of 0 or more.")


def _may_be_none(name: str) -> bool:
    return name in ("max_tokens", "seed", "top_k", "top_p", "deadline_s", "logprobs")


def _all_whole(values: Iterable[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
