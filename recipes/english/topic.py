"""What a small scene may say: sentences of one topic, with slots and choices (see `scenes`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """A scene has one opening, one to four events in their order, and mostly an ending."""

    openings: tuple[str, ...]
    events: tuple[str, ...]
    endings: tuple[str, ...]
