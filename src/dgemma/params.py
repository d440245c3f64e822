"""Generation options: one frozen, validated set. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Required, TypedDict

from dgemma.errors import InputError, suggestion

Decode = Literal["diffuse", "verified", "lossless", "causal", "auto"]
DECODES: tuple[Decode, ...] = ("diffuse", "verified", "lossless", "causal", "auto")
CanvasLen = int | Literal["auto"]
Acceptance = Literal["entropy_bound", "confidence", "fixed"]

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_LOGPROBS = 20
MAX_TOP_K = 1024
MAX_STEPS = 1024
_LARGEST = 2.0**62  # of options without a limit of their own: clocks and tensors count as far

# A preset trades speed for quality; options it does not list stay as the checkpoint sets them.
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


class SamplingOptions(TypedDict, total=False):
    """Keyword options of every method that samples. The fields of `GenerationParams` document them."""

    seed: int | None
    temperature: float | None
    canvas_len: CanvasLen | None
    decode: Decode | None
    draft_steps: int | None
    verify_threshold: float | None
    max_denoising_steps: int | None
    t_min: float | None
    t_max: float | None
    acceptance: Acceptance | None
    entropy_bound: float | None
    min_confidence: float | None
    accept_per_step: int | None
    stability_threshold: int | None
    confidence_threshold: float | None
    top_k: int | None
    top_p: float | None
    end_tokens: tuple[int, ...] | None
    ignore_end: bool | None
    logprobs: int | None


class FormatOptions(TypedDict, total=False):
    """The response format of a text; at most one of them."""

    regex: str | None
    choice: Sequence[str] | None
    json_schema: Mapping[str, Any] | str | bool | None
    json_object: bool | None


class InfillOptions(SamplingOptions, FormatOptions, total=False):
    """Keyword options of `LanguageModel.fill`."""


class Pin(TypedDict, total=False):
    """Tokens of the answer that are given: at a position, one of the three."""

    at: Required[int]
    """Where it begins, in tokens of the answer, from 0 and through all its canvases."""
    text: str
    """Its tokens are fixed."""
    token_ids: Sequence[int]
    """They are fixed."""
    any_of: Sequence[str | int]
    """One of these stands there: texts of one token, or token ids. The model chooses."""


class StartingCanvas(TypedDict, total=False):
    """What the answer's canvases start from in place of noise: one of `text` and `token_ids`."""

    text: str
    token_ids: Sequence[int]
    read_only: Sequence[Sequence[int]]
    """Spans [begin, end] that stay as they are: of characters of `text`, or of `token_ids`."""


class GenerateOptions(SamplingOptions, FormatOptions, total=False):
    """Keyword options of `LanguageModel.generate`, `stream`, `chat` and `stream_chat`."""

    max_tokens: int | None
    stop: str | Sequence[str] | None
    deadline_s: float | None
    pins: Mapping[int, int | Sequence[int]] | Sequence[Pin] | None
    """Given tokens of the answer; a mapping from a position to a token, or to several allowed ones, is
    short for them."""
    canvas: StartingCanvas | str | None
    """What to start from; a text is short for one without read-only spans."""


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """Options of one generation. `GenerationParams.make(...)` refuses unknown names with a suggestion."""

    max_tokens: int | None = None
    """Maximum number of tokens to generate; None: 1,024, or what the context leaves if that is less."""
    seed: int | None = None
    """The same seed gives the same text; None: a random one, returned with the answer."""
    temperature: float = 1.0
    """Scales both ends of the schedule (1: as the checkpoint has it); 0 takes the argmax."""
    canvas_len: CanvasLen | None = None
    """Tokens of a canvas, at most the model's own; None: these. "auto": as many as `max_tokens` and the
    response format leave, and fewer as soon as the rest of the canvas is end tokens. Part of what a seed's
    text depends on."""
    decode: Decode = "diffuse"
    """"diffuse" refines canvases, "causal" writes left to right. "lossless" writes the causal text of the
    same seed, by checking canvases; "verified" keeps what is likely enough. "auto" writes the causal text by
    "lossless" while that pays, else left to right."""
    draft_steps: int = 4
    """With "verified" and "lossless": denoise steps of a canvas before it is checked, at most."""
    verify_threshold: float = 0.1
    """With "verified": the least causal probability of a token of the canvas that is kept."""
    max_denoising_steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    acceptance: Acceptance = "entropy_bound"
    """Which positions keep their sampled token: released rule, probability threshold, or fixed number."""
    entropy_bound: float = 0.1
    min_confidence: float = 0.9
    """With acceptance "confidence": the least probability of the argmax at an accepted position."""
    accept_per_step: int = 16
    """With acceptance "fixed": positions accepted per step."""
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    top_k: int | None = None
    """Sample among the k most likely tokens only. Costs a second vocabulary scan."""
    top_p: float | None = None
    """Sample among the most likely tokens that together reach p (searched among the top 1,024). Costs a
    second vocabulary scan."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    end_tokens: tuple[int, ...] = (1, 106)
    """Tokens that end the answer, from the checkpoint."""
    ignore_end: bool = False
    """Continue past end tokens, for measurements."""
    deadline_s: float | None = None
    """Seconds after which the answer so far is returned, with finish reason "deadline"."""
    logprobs: int | None = None
    """Number of most likely tokens to return, with log-probabilities, per token of the answer."""

    def __post_init__(self) -> None:
        whole = (
            ("max_tokens", 1, None), ("seed", -(1 << 63), (1 << 64) - 1),
            ("max_denoising_steps", 1, MAX_STEPS), ("accept_per_step", 1, None),
            ("stability_threshold", 0, None), ("top_k", 1, MAX_TOP_K), ("logprobs", 0, MAX_LOGPROBS),
            ("draft_steps", 1, MAX_STEPS),
        )  # fmt: skip
        for name, least, most in whole:
            self._check_number(name, int, least, most)
        real = (
            ("temperature", 0.0, 100.0), ("t_min", 0.0, 100.0), ("t_max", 0.0, 100.0),
            ("entropy_bound", 0.0, None), ("min_confidence", 0.0, 1.0), ("confidence_threshold", 0.0, None),
            ("top_p", 0.0, 1.0), ("deadline_s", 0.0, None), ("verify_threshold", 0.0, 1.0),
        )  # fmt: skip
        for name, low, high in real:
            self._check_number(name, (int, float), low, high)
        if self.top_p == 0:
            raise InputError.about(
                "top_p", "is 0; it must be above 0. For the most likely token use temperature 0."
            )
        if self.t_min > self.t_max:
            raise InputError.about(
                "t_min", f"is {self.t_min}, t_max is {self.t_max}; t_min must not be larger."
            )
        if self.canvas_len not in (None, "auto"):
            given = self.canvas_len
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise InputError.about(
                    "canvas_len", f'is {given!r}; it must be a whole number of at least 1, or "auto".'
                )
        self._check_choice("decode", DECODES)
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
            raise InputError.about(
                "preset", f"is {preset!r}{suggestion(str(preset), PRESETS)} Presets: {', '.join(PRESETS)}."
            )
        if isinstance(options.get("stop"), str):
            options["stop"] = (options["stop"],)
        for name in ("stop", "end_tokens"):
            if isinstance(options.get(name), list):
                options[name] = tuple(options[name])
        explicit = {name: value for name, value in options.items() if value is not None}
        changes = {**PRESETS[preset or "balanced"], **explicit}
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
        most = _LARGEST if high is None else high
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if is_number and low <= value <= most:  # not a NaN
            return
        is_too_large = is_number and value > most
        rule = f"at least {low:g}" if high is None and not is_too_large else f"from {low:g} to {most:g}"
        what = "a whole number" if kind is int else "a number"
        raise InputError.about(name, f"is {value!r}; it must be {what} {rule}.")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise InputError.about(
                name, f"is {value!r}{suggestion(str(value), choices)} Choices: {', '.join(choices)}."
            )

    def _check_stop(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise InputError.about("stop", f"is {self.stop!r}; it must be a string or a list of strings.")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InputError.about(
                "stop", f"has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken."
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_LEN:
                raise InputError.about(
                    "stop", f"has a string of {len(text)} characters; give 1 to {MAX_STOP_STRING_LEN}."
                )
        if not isinstance(self.end_tokens, tuple) or not _all_whole(self.end_tokens):
            raise InputError.about(
                "end_tokens", f"is {self.end_tokens!r}; it must be a list of whole numbers of 0 or more."
            )


def _may_be_none(name: str) -> bool:
    return name in ("max_tokens", "seed", "top_k", "top_p", "deadline_s", "logprobs")


def _all_whole(values: Iterable[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
