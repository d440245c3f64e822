"""What the playground's page is told: the models, where each is served, and what it can be asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from starlette.responses import Response

from dgemma import __version__

FACTS_PATH = "/playground.json"
Mode = Literal["chat", "fill", "edit", "decide", "forms", "sudoku", "canvas", "race"]


@dataclass(frozen=True, kw_only=True)
class PlaygroundModel:
    """A model behind the page."""

    base: str
    """What its paths begin with: empty, or such as `/text`."""
    name: str
    """As clients name it."""
    modes: tuple[Mode, ...]
    traces: bool
    """Whether requests may ask for their trace: the page then shows live canvases."""
    canvas_len: int
    note: str = ""
    """One line for people: what it was trained on."""


@dataclass(frozen=True, kw_only=True)
class PlaygroundFacts:
    """The content of /playground.json."""

    models: tuple[PlaygroundModel, ...]
    record_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schemas by name."""
    trained_on_record_types: bool = False
    """Else the schema is told in words."""
    puzzles: Sequence[Mapping[str, str]] = ()
    """Sudokus: `band` and `clues`."""

    def to_json(self) -> bytes:
        return json.dumps({"version": __version__, **asdict(self)}, ensure_ascii=False).encode()


def facts_response(facts: PlaygroundFacts) -> Response:
    return Response(
        facts.to_json(),
        media_type="application/json",
        headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
    )
