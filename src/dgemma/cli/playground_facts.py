"""What the playground's page is told of a model: its modes, record types, and Sudokus to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.checkpoint.bundled import PREFIX, bundled_path
from dgemma.checkpoint.hub import cached, is_hub_name
from dgemma.checkpoint.source import read_config
from dgemma.forms.extraction import read_record_types
from dgemma.forms.record_types import RECORD_TYPES
from dgemma.server.http.settings import Settings
from dgemma.server.playground import Mode, PlaygroundFacts, PlaygroundModel
from dgemma.sudoku.puzzles import BANDS, held_out
from dgemma.sudoku.tokens import VOCABULARY

if TYPE_CHECKING:
    from dgemma.engine.service import ServedModel
    from dgemma.server.text import CheckpointText

_PUZZLES_PER_BAND = 12
_RAW: tuple[Mode, ...] = ("canvas", "race")
_NOTES = {
    "text": "A toy of 2.7 million parameters, which knows small scenes of plain English. It shows how a "
    "canvas settles, not what large models know.",
    "forms": "Reads short messages, and writes what they say as records.",
    "sudoku": "Trained on Sudokus, and nothing else.",
}
_BUNDLED_MODES: dict[str, tuple[Mode, ...]] = {
    "text": ("chat", "fill", "edit", "decide", *_RAW),
    "forms": ("forms", *_RAW),
    "sudoku": ("sudoku", *_RAW),
}


def playground_facts(
    model: str, settings: Settings, served: ServedModel, text: CheckpointText
) -> PlaygroundFacts:
    """Of a model that is loaded."""
    is_sudoku = served.vocab_size == len(VOCABULARY) and all(
        text.token_text(token).text == word for token, word in enumerate(VOCABULARY)
    )
    directory = _directory(model)
    trained = None if directory is None else read_record_types(directory)
    modes: tuple[Mode, ...] = ("sudoku", *_RAW)
    if not is_sudoku:
        chat: tuple[Mode, ...] = ("chat", "edit", "decide", "forms") if text.has_chat_template else ()
        modes = (*chat, "fill", *_RAW)
    return PlaygroundFacts(
        models=(
            PlaygroundModel(
                base="",
                name=settings.served_model_name,
                modes=modes,
                traces=settings.traces,
                canvas_len=served.canvas_len,
                note=_NOTES.get(model.removeprefix(PREFIX), "") if model.startswith(PREFIX) else "",
            ),
        ),
        record_types=RECORD_TYPES if trained is None else trained,
        trained_on_record_types=trained is not None,
        puzzles=_puzzles() if is_sudoku else (),
    )


def _directory(model: str) -> Path | None:
    """Where the checkpoint is, without a question to the hub: it has been loaded."""
    if model.startswith(PREFIX):
        return bundled_path(model.removeprefix(PREFIX))
    path = Path(model).expanduser()
    if path.exists():
        return path
    return cached(model) if is_hub_name(model) else None


def bundled_facts(names: Mapping[str, str]) -> PlaygroundFacts:
    """Of the bundled models, before they are loaded. names: by base, such as `/text`, the model's name."""
    models, types = [], None
    for base, name in names.items():
        path = bundled_path(name)
        _, config = read_config(path)
        types = types or read_record_types(path)
        models.append(
            PlaygroundModel(
                base=base,
                name=PREFIX + name,
                modes=_BUNDLED_MODES[name],
                traces=True,
                canvas_len=config.canvas_len,
                note=_NOTES[name],
            )
        )
    return PlaygroundFacts(
        models=tuple(models),
        record_types=types or RECORD_TYPES,
        trained_on_record_types=types is not None,
        puzzles=_puzzles(),
    )


def _puzzles() -> Sequence[Mapping[str, Any]]:
    """Some of each band that no bundled model was trained on."""
    return [
        {"band": band, "clues": puzzle.clues.cells}
        for band in BANDS
        for puzzle in held_out(band)[:_PUZZLES_PER_BAND]
    ]
