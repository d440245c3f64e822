"""How long work on data tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int | None], None]
"""Called with (done so far, in all); None where nobody knows how much there is."""
