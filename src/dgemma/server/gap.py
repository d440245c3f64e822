"""A gap between two texts: how much context it needs, and the text it is filled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dgemma.errors import InputError
from dgemma.server.http.errors import context_too_long, invalid
from dgemma.server.plan import TaskCounts, TaskOutcome
from dgemma.structured_output.response_format import TextFormat
from dgemma.tasks.context import TaskContext
from dgemma.tasks.infill import DEFAULT_MAX_TOKENS, Filled, FillOptions, fill
from dgemma.tasks.rounds import Rounds
from dgemma.text.stop_strings import StopStrings
from dgemma.text.tokenizer import Tokenizer

# Tokens that a gap needs in the context beside its canvases: those after it that are scored with it.
_BESIDE = 24
# The least share of a canvas that is open to a gap; the rest shows what follows.
_OPEN = 0.75
# Tokens that are removed at its borders and written again.
_BORDERS = 2


@dataclass(frozen=True, kw_only=True)
class GapText:
    """A gap's text after stop strings and limits were applied."""

    text: str = ""
    num_tokens: int = 0
    reason: Literal["stop", "length", "deadline"]
    stop_string: str | None = None

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """OpenAI has no finish reason for a deadline."""
        return "stop" if self.reason == "stop" else "length"


@dataclass(frozen=True, kw_only=True)
class MeasuredGap:
    """A gap before it is filled."""

    tokenizer: Tokenizer
    num_before: int  # tokens, with the one that begins a text
    num_after: int
    max_tokens: int
    fits: bool  # all of the text before it, into the context beside it
    stop: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        return self.num_before + self.num_after

    def text(self, outcome: TaskOutcome[Filled]) -> GapText:
        if outcome.result is None:
            return GapText(reason="deadline")
        stops = StopStrings(self.stop)
        text = stops.add(outcome.result.text) + stops.finish()
        # A token across a border is partly the client's own text.
        count = min(len(self.tokenizer.encode(text)), self.max_tokens)
        is_full = stops.stopped is None and count >= self.max_tokens
        reason: Literal["stop", "length"] = "length" if is_full else "stop"
        return GapText(text=text, num_tokens=count, reason=reason, stop_string=stops.stopped)

    def counts(self, outcome: TaskOutcome[Filled]) -> TaskCounts:
        found = self.text(outcome)
        return TaskCounts(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=found.num_tokens,
            reason=found.reason,
            text=found.text,
        )


def measured_gap(
    task: TaskContext,
    texts: Sequence[str],
    limit: int | None,
    *,
    most_prompt_tokens: int | None,
    prompt_field: str,
    limit_field: str,
) -> MeasuredGap:
    """The gap between two texts, refused if the context has no space for it.

    `prompt_field`, `limit_field`: the client's names of the text before it and of its token limit.
    """
    try:
        before, after = (len(task.tokenizer.encode(text)) for text in texts)
    except InputError as error:
        raise invalid(f"{prompt_field}: {error}", prompt_field, error.code) from None
    num_before = 1 + before
    if most_prompt_tokens is not None and num_before + after > most_prompt_tokens:
        raise context_too_long(
            f"the texts before and after the gap have {num_before + after} tokens; this server takes at "
            f"most {most_prompt_tokens}. Shorten them.",
            prompt_field,
        )
    max_tokens = DEFAULT_MAX_TOKENS if limit is None else limit
    if limit is None and num_before + _needed(task, max_tokens) > task.max_positions:
        one_canvas = max(1, int(_OPEN * task.canvas_len) - _BORDERS)
        max_tokens = min(max_tokens, one_canvas)
    try:
        FillOptions(max_tokens=max_tokens)
    except InputError as error:
        raise invalid(str(error.with_field(limit_field)), limit_field) from None
    left = task.max_positions - _needed(task, max_tokens)
    if limit is not None and left < 1:
        raise context_too_long(
            f"{limit_field} is {limit}; a gap of so many tokens has no room in this model's context of "
            f"{task.max_positions}. Lower it.",
            limit_field,
        )
    return MeasuredGap(
        tokenizer=task.tokenizer,
        num_before=num_before,
        num_after=after,
        max_tokens=max_tokens,
        fits=num_before <= left,
        stop=task.params.stop,
    )


def filled_gap(
    task: TaskContext, texts: Sequence[str], max_tokens: int, text_format: TextFormat | None = None
) -> Rounds[Filled]:
    """Fill the gap. If no token fits across its borders, as in very short gaps, fill between the borders."""
    before, after = texts
    options = FillOptions(max_tokens=max_tokens, form=text_format)
    try:
        result = yield from fill(task, before, after, options)
    except InputError:
        result = yield from fill(task, before, after, replace(options, heal=False))
    return result


def _needed(task: TaskContext, max_tokens: int) -> int:
    """Context tokens that a gap of this length needs: whole canvases, and the tokens scored after them."""
    beyond = max(0, max_tokens + _BORDERS - int(_OPEN * task.canvas_len))
    return (1 + -(-beyond // task.canvas_len)) * task.canvas_len + _BESIDE
