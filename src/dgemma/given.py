"""What is given of an answer before it is written: fixed tokens, sets, a beginning. Imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgemma.errors import InputError

Words = tuple[int, ...]

MAX_SET_WORDS = 1 << 22  # in all sets of a request together


@dataclass(frozen=True, kw_only=True)
class Given:
    """By position of the answer, counted from its first token, through all its canvases."""

    fixed: Mapping[int, int] = field(default_factory=dict)
    """The token that stands here, whatever the model thinks."""
    among: Mapping[int, Words] = field(default_factory=dict)
    """The words one of which stands here: the model chooses, under its distribution among them."""
    begin: Mapping[int, int] = field(default_factory=dict)
    """What the canvas holds here at its first step in place of noise. The model may change it."""
    watch: Mapping[int, Words] = field(default_factory=dict)
    """The answer tells the log-probability of each of these words here, as its canvas settled."""

    def __bool__(self) -> bool:
        return bool(self.fixed or self.among or self.begin or self.watch)

    @property
    def choices(self) -> dict[int, Words]:
        """The words one of which stands at each position about which something is said."""
        return {**self.among, **{position: (token,) for position, token in self.fixed.items()}}

    @classmethod
    def from_pins(cls, pins: Mapping[int, int | Sequence[int]] | None) -> Given | None:
        """A token fixes a position; several limit it to these."""
        if not pins:
            return None
        if not isinstance(pins, Mapping):
            raise InputError(
                f"pins is a {type(pins).__name__}; give a mapping from position to token or tokens."
            )
        fixed: dict[int, int] = {}
        among: dict[int, Words] = {}
        for position, pin in pins.items():
            if isinstance(pin, int) and not isinstance(pin, bool):
                fixed[position] = pin
            elif isinstance(pin, Iterable) and not isinstance(pin, str | bytes):
                words = tuple(pin)
                # What is no token is refused by `check`, with the others.
                among[position] = tuple(sorted(set(words))) if all(map(_is_whole, words)) else words
            else:
                raise InputError(f"the pin of position {position} is {pin!r}; give a token or several.")
        return cls(fixed=fixed, among=among)

    def check(self, vocab_size: int, max_tokens: int) -> None:
        """Refuse what this model, or this answer, has no place for."""
        sets: tuple[tuple[str, Mapping[int, Words]], ...] = (
            ("fixed", {p: (t,) for p, t in self.fixed.items()}),
            ("among", self.among),
            ("begin", {p: (t,) for p, t in self.begin.items()}),
            ("watch", self.watch),
        )
        if sum(len(words) for words in (*self.among.values(), *self.watch.values())) > MAX_SET_WORDS:
            raise InputError(f"the sets of all positions hold more than {MAX_SET_WORDS} words; give fewer.")
        for kind, positions in sets:
            for position, words in positions.items():
                if not _is_whole(position) or not 0 <= position < max_tokens:
                    raise InputError(
                        f"position {position!r} is pinned; the answer has positions 0 to {max_tokens - 1}. "
                        "Raise max_tokens or move the pin."
                    )
                if not words:
                    raise InputError(
                        f"position {position} has an empty set of words; nothing could stand there."
                    )
                if wrong := _wrong(words, vocab_size):
                    raise InputError(f"position {position} {wrong}")
                if kind == "among" and position in self.fixed:
                    raise InputError(
                        f"position {position} is both fixed and limited to a set; give one of them."
                    )


# Large sets that were found right: one stands in many requests of a fill, each of which is looked at several
# times, and a look at a hundred thousand words takes tens of milliseconds. The same object, not an equal one.
_RIGHT: deque[tuple[Words, int]] = deque(maxlen=8)
_LARGE = 1024


def _wrong(words: Words, vocab_size: int) -> str | None:
    if any(words is known and vocab_size == size for known, size in tuple(_RIGHT)):
        return None
    for word in words:
        if not _is_whole(word) or not 0 <= word < vocab_size:
            return f"is given token {word!r}; this vocabulary ends at {vocab_size - 1}."
    if len(set(words)) != len(words):
        return "has a word twice in its set; give each once."
    if len(words) > _LARGE and isinstance(words, tuple):
        _RIGHT.append((words, vocab_size))
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
