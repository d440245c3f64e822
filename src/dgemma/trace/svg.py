"""A picture of a trace, as SVG: some of its steps, one under the other; light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from dgemma.trace.frames import Cell, Frame
from dgemma.trace.visible import num_columns, visible

COLUMNS = 92
_CHAR, _LINE, _MARGIN = 8.4, 20, 14  # of a monospaced font of 14 pixels
_MAX_LINES = 200
_TITLE_COLUMNS = 27
_STYLE = """
text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}
.b{fill:#fff;stroke:#d0d7de}.t{fill:#656d76}
.l0{fill:#1f2328}.l1{fill:#1a7f37}.l2{fill:#9a6700}.l3{fill:#a8b0b8}
.p{fill:#0969da}.c{fill:#cf222e}.r{text-decoration:underline}
@media(prefers-color-scheme:dark){.b{fill:#161b22;stroke:#30363d}.t{fill:#8b949e}
.l0{fill:#e6edf3}.l1{fill:#57ab5a}.l2{fill:#d4a72c}.l3{fill:#59626d}.p{fill:#58a6ff}.c{fill:#ff7b72}}
""".replace("\n", "")


def chosen_frames(frames: Sequence[Frame], count: int) -> list[Frame]:
    """`count` of them, evenly, the first and the last among them."""
    if len(frames) <= count or count < 2:
        return list(frames[-max(count, 1) :])
    return [frames[round(at * (len(frames) - 1) / (count - 1))] for at in range(count)]


def to_svg(frames: Sequence[Frame], *, columns: int = COLUMNS) -> str:
    """Tokens by how sure they are: solid, green, yellow, grey. Underlined: changed by this step.

    Blue: pinned. Red: written by the causal pass in place of a draft's token. Narrow canvases stand side by
    side.
    """
    box_width = 2 * _MARGIN + max(columns, _TITLE_COLUMNS) * _CHAR
    beside = max(1, int((COLUMNS * _CHAR + 3 * _MARGIN) // (box_width + _MARGIN)))
    width = _MARGIN + min(beside, len(frames)) * (box_width + _MARGIN)
    parts: list[str] = []
    top = float(_MARGIN)
    for begin in range(0, len(frames), beside):
        some = frames[begin : begin + beside]
        lines = [list(wrapped(frame.cells, columns))[:_MAX_LINES] or [[]] for frame in some]
        height = max(map(len, lines)) * _LINE + 16
        for number, (frame, own) in enumerate(zip(some, lines, strict=True)):
            parts += _box(frame, own, _MARGIN + number * (box_width + _MARGIN), top, box_width, height)
        top += 22 + height + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top:.0f}" role="img" '
        f'viewBox="0 0 {width:.0f} {top:.0f}"><title>{escape(_title(frames))}</title>'
        f"<style>{_STYLE}</style>" + "\n".join(parts) + "</svg>\n"
    )


def _box(
    frame: Frame, lines: Sequence[Sequence[Cell]], left: float, top: float, width: float, height: float
) -> Iterator[str]:
    yield f'<text class="t" x="{left:.0f}" y="{top + 14:.0f}">{escape(frame.title)}</text>'
    place = f'x="{left:.0f}" y="{top + 22:.0f}" width="{width:.0f}" height="{height:.0f}"'
    yield f'<rect class="b" {place} rx="6"/>'
    for number, line in enumerate(lines):
        y, column = top + 22 + 8 + number * _LINE + 14, 0
        for cell in line:
            length = num_columns(cell.text)
            yield (
                f'<text class="{_classes(cell)}" x="{left + _MARGIN + column * _CHAR:.1f}" y="{y:.0f}" '
                f'textLength="{length * _CHAR:.1f}" lengthAdjust="spacingAndGlyphs">'
                f"{escape(cell.text)}</text>"
            )
            column += length


def _title(frames: Sequence[Frame]) -> str:
    text = "".join(cell.text for cell in frames[-1].cells) if frames else ""
    return f"A canvas, step by step: {visible(text, 200)}"


def _classes(cell: Cell) -> str:
    if cell.state == "pinned":
        return "p"
    if cell.state == "corrected":
        return "c"
    return f"l{cell.level}" + (" r" if cell.is_changed else "")


def wrapped(cells: Sequence[Cell], columns: int = COLUMNS) -> Iterator[list[Cell]]:
    """Lines of at most so many columns; a likely end of a line ends one."""
    line: list[Cell] = []
    column = 0
    for cell in cells:
        if not cell.text:
            continue
        if column + num_columns(cell.text) > columns and line:
            yield line
            line, column = [], 0
        line.append(cell)
        column += num_columns(cell.text)
        if cell.ends_line:
            yield line
            line, column = [], 0
    if line:
        yield line
