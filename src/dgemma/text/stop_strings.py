"""Stop strings: a stream of text that ends before the first of them."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text on until a stop string is complete; shows no part of it.

    The stop that is complete first wins; of two that end together, the longer.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._beginnings = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._held = ""  # the longest end of the text that may still become a stop
        self.stopped: str | None = None

    def add(self, text: str) -> str:
        """What can be shown now."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        # At most one stop less a character is held, so that each call costs only its own text.
        first = max(0, len(text) - self._longest + 1)
        cut = next((i for i in range(first, len(text)) if text[i:] in self._beginnings), len(text))
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The text held back, when no more comes: the stop it began will not be completed."""
        rest, self._held = self._held, ""
        return rest
