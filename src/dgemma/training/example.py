"""What the objective learns from: tokens, and which of them the model shall learn to write. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.errors import InputError


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of an example."""

    start: int
    stop: int


@dataclass(frozen=True)
class Example:
    """One conversation or text, in tokens.

    `responses` are what the model shall learn to write, in order: a reply's content and its turn end, or
    all of a text; never a header. Canvases are counted from the start of each. Tokens outside are read only.
    `clipped`: the last response went on behind the last token and was cut off by a length limit, so nothing
    may be learned about where it ends.
    """

    tokens: tuple[int, ...]
    responses: tuple[Span, ...]
    clipped: bool = False

    def __post_init__(self) -> None:
        if not self.responses:
            raise InputError("an example has no response; there is nothing to learn from it.")
        end = 0
        for span in self.responses:
            # A response needs one token in front of it: the encoder predicts it from there.
            if not max(1, end) <= span.start < span.stop <= len(self.tokens):
                raise InputError(
                    f"a response spans tokens {span.start} to {span.stop}; responses follow each other "
                    f"inside an example's {len(self.tokens)} tokens, after at least one token of prompt."
                )
            end = span.stop
        if self.clipped and end != len(self.tokens):
            raise InputError("an example is clipped, but its last response does not reach its end.")
