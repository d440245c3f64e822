"""Stop strings: end a stream of text before the first of them."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text on until a stop string is complete; emits no part of the stop string.

    The stop string that is complete first wins; of two that end at the same position, the longer.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._beginnings = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._held = ""  # the longest suffix of the text that is a prefix of a stop string
        self.stopped: str | None = None

    def add(self, text: str) -> str:
        """The text that can be emitted now."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        # Less than one stop string is held back, so the cost of a call depends on its own text only.
        first = max(0, len(text) - self._longest + 1)
        cut = next((i for i in range(first, len(text)) if text[i:] in self._beginnings), len(text))
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The text held back; called at the end of the stream."""
        rest, self._held = self._held, ""
        return rest
