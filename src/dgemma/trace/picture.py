"""A trace as PNG or as an animated GIF, drawn with Pillow and the font of Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.errors import InputError
from dgemma.trace.frames import Cell, Frame
from dgemma.trace.svg import COLUMNS, wrapped
from dgemma.trace.visible import num_columns

if TYPE_CHECKING:
    from PIL.Image import Image

_CHAR, _LINE, _MARGIN, _FONT = 10, 24, 16, 17
_BACK, _BOX, _EDGE, _TITLE = "#ffffff", "#f6f8fa", "#d0d7de", "#656d76"
_LEVELS = ("#1f2328", "#1a7f37", "#9a6700", "#a8b0b8")
_PINNED, _CORRECTED = "#0969da", "#cf222e"
MAX_FRAMES = 400
MAX_LINES = 60


def write_png(frames: Sequence[Frame], path: Path) -> None:
    _check_extra()
    pictures = [_drawn(frame, _num_lines([frame])) for frame in frames]
    from PIL import Image

    whole = Image.new("RGB", (pictures[0].width, sum(picture.height for picture in pictures)), _BACK)
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    whole.save(path, format="PNG")


def write_gif(frames: Sequence[Frame], path: Path, *, frame_ms: int = 300) -> None:
    """A picture per step; the last stays for two seconds."""
    _check_extra()
    if len(frames) > MAX_FRAMES:
        raise InputError(f"the trace has {len(frames)} steps; a GIF takes at most {MAX_FRAMES}.")
    lines = _num_lines(frames)
    first, *others = (_drawn(frame, lines) for frame in frames)
    times = [frame_ms] * len(others) + [2000]
    first.save(path, format="GIF", save_all=True, append_images=others, duration=times, loop=0)


def _check_extra() -> None:
    try:
        import matplotlib  # noqa: F401  (which needs Pillow, and has a monospaced font)
    except ImportError:
        raise InputError(
            "PNG and GIF need Matplotlib: pip install 'dgemma[plot]'. SVG needs nothing more."
        ) from None


def _num_lines(frames: Sequence[Frame]) -> int:
    return min(MAX_LINES, max(1, *(len(list(wrapped(frame.cells))) for frame in frames)))


def _drawn(frame: Frame, num_lines: int) -> Image:
    import matplotlib as mpl
    from PIL import Image, ImageDraw, ImageFont

    width = 4 * _MARGIN + COLUMNS * _CHAR
    picture = Image.new("RGB", (width, num_lines * _LINE + 5 * _MARGIN), _BACK)
    draw, font = (
        ImageDraw.Draw(picture),
        ImageFont.truetype(f"{mpl.get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", _FONT),
    )
    draw.text((_MARGIN, _MARGIN // 2), frame.title, fill=_TITLE, font=font)
    box = (_MARGIN, 2 * _MARGIN, width - _MARGIN, picture.height - _MARGIN)
    draw.rounded_rectangle(box, radius=6, fill=_BOX, outline=_EDGE)
    for number, line in enumerate(list(wrapped(frame.cells))[:num_lines]):
        column, y = 0, 3 * _MARGIN + number * _LINE
        for cell in line:
            x = 2 * _MARGIN + column * _CHAR
            draw.text((x, y - 4), cell.text, fill=_colour(cell), font=font)
            columns = num_columns(cell.text)
            if cell.is_changed:
                draw.line((x, y + _FONT, x + columns * _CHAR - 2, y + _FONT), fill=_colour(cell))
            column += columns
    return picture


def _colour(cell: Cell) -> str:
    if cell.state == "pinned":
        return _PINNED
    return _CORRECTED if cell.state == "corrected" else _LEVELS[cell.level]
