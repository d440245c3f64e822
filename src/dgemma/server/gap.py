"""A gap between two texts: how much room there is for it, and what its text is in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dgemma.canvas.fill import DEFAULT_MAX_TOKENS, Filled, FillOptions, fill
from dgemma.canvas.rounds import Rounds
from dgemma.canvas.workbench import Workbench
from dgemma.constraint.forms import TextForm
from dgemma.errors import InputError
from dgemma.server.api_error import refused
from dgemma.server.plan import too_long
from dgemma.server.work import Counts, Done
from dgemma.text.stop_strings import StopStrings
from dgemma.text.tokenizer import Tokenizer

# Tokens that a gap needs in the context beside its canvases: those behind it that are scored with it.
_BESIDE = 24
# The least share of a canvas that is open to a gap; the rest shows what follows.
_OPEN = 0.75
# Words that are taken back at its borders.
_BORDERS = 2


@dataclass(frozen=True, kw_only=True)
class GapText:
    """What is left of a gap's text when stop strings and limits have had their say."""

    text: str = ""
    num_tokens: int = 0
    reason: Literal["stop", "length", "deadline"]
    stop_string: str | None = None

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """OpenAI has no word for a deadline."""
        return "stop" if self.reason == "stop" else "length"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """What is known of a gap before it is filled."""

    tokenizer: Tokenizer
    num_before: int  # tokens, with what begins a text
    num_behind: int
    max_tokens: int
    fits: bool  # all of the text before it, into the context beside it
    stop: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        return self.num_before + self.num_behind

    def text(self, done: Done[Filled]) -> GapText:
        if done.result is None:
            return GapText(reason="deadline")
        stops = StopStrings(self.stop)
        text = stops.add(done.result.text) + stops.finish()
        # A word that stands across a border is partly the caller's own.
        count = min(len(self.tokenizer.encode(text)), self.max_tokens)
        is_full = stops.stopped is None and count >= self.max_tokens
        reason: Literal["stop", "length"] = "length" if is_full else "stop"
        return GapText(text=text, num_tokens=count, reason=reason, stop_string=stops.stopped)

    def counts(self, done: Done[Filled]) -> Counts:
        found = self.text(done)
        return Counts(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=found.num_tokens,
            reason=found.reason,
            text=found.text,
        )


def measured_gap(
    bench: Workbench,
    texts: Sequence[str],
    limit: int | None,
    *,
    most_prompt_tokens: int | None,
    prompt_name: str,
    limit_name: str,
) -> Gap:
    """The gap between two texts, refused if there is no room for it at all.

    `prompt_name`, `limit_name`: what the caller calls the text before it, and the most tokens it may have.
    """
    try:
        before, behind = (len(bench.tokenizer.encode(text)) for text in texts)
    except InputError as error:
        raise refused(f"{prompt_name}: {error}", prompt_name) from None
    num_before = 1 + before
    if most_prompt_tokens is not None and num_before + behind > most_prompt_tokens:
        raise too_long(
            f"the texts before and behind the gap have {num_before + behind} tokens; this server takes at "
            f"most {most_prompt_tokens}. Shorten them.",
            prompt_name,
        )
    max_tokens = DEFAULT_MAX_TOKENS if limit is None else limit
    if limit is None and num_before + _needed(bench, max_tokens) > bench.max_positions:
        one_canvas = max(1, int(_OPEN * bench.canvas_len) - _BORDERS)
        max_tokens = min(max_tokens, one_canvas)
    try:
        FillOptions(max_tokens=max_tokens)
    except InputError as error:
        raise refused(str(error).replace("max_tokens", limit_name, 1), limit_name) from None
    room = bench.max_positions - _needed(bench, max_tokens)
    if limit is not None and room < 1:
        raise too_long(
            f"{limit_name} is {limit}; a gap of so many tokens has no room in this model's context of "
            f"{bench.max_positions}. Lower it.",
            limit_name,
        )
    return Gap(
        tokenizer=bench.tokenizer,
        num_before=num_before,
        num_behind=behind,
        max_tokens=max_tokens,
        fits=num_before <= room,
        stop=bench.params.stop,
    )


def filled_gap(
    bench: Workbench, texts: Sequence[str], max_tokens: int, form: TextForm | None = None
) -> Rounds[Filled]:
    """The gap's text. Where no word may stand across its borders, as short as it is, none has to."""
    before, behind = texts
    options = FillOptions(max_tokens=max_tokens, form=form)
    try:
        result = yield from fill(bench, before, behind, options)
    except InputError:
        result = yield from fill(bench, before, behind, replace(options, heal=False))
    return result


def _needed(bench: Workbench, max_tokens: int) -> int:
    """Tokens of context that a gap of this length takes: whole canvases, and what is scored behind them."""
    beyond = max(0, max_tokens + _BORDERS - int(_OPEN * bench.canvas_len))
    return (1 + -(-beyond // bench.canvas_len)) * bench.canvas_len + _BESIDE
