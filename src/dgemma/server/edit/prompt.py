"""The message of an edit in Mercury's form: a file, the region of it to rewrite, and other context.

Its tags are parsed here. All else goes to the tokenizer as text, unknown tags too: no text of a client
becomes a control token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dgemma.server.http.errors import ApiError, invalid

FIELD = "messages"
_REGION, _FILE = "code_to_edit", "current_file_content"
_SNIPPETS, _HISTORY = "recently_viewed_code_snippets", "edit_diff_history"
_CURSOR = "<|cursor|>"
_TAG = re.compile(rf"<\|(/?)({_REGION}|{_FILE}|{_SNIPPETS}|{_HISTORY})\|>")
# Around each snippet, of any number.
_SNIPPET_TAG = re.compile(r"<\|/?recently_viewed_code_snippet\|>\n?")
_HEADINGS = {_SNIPPETS: "Recently viewed:", _HISTORY: "Recent changes:", _FILE: "The file:"}


@dataclass(frozen=True, kw_only=True)
class EditPrompt:
    before: str  # of the file, up to the region
    region: str
    after: str
    instruction: str  # all other text


@dataclass(frozen=True)
class _Span:
    """Where a part stands in the message: its tags, and what is between them."""

    begin: int
    start: int
    stop: int
    end: int


def parse_edit_message(text: str) -> EditPrompt:
    spans = _spans(text)
    if _REGION not in spans:
        raise _wrong(
            f"there is no {_open(_REGION)}; put it and {_close(_REGION)} around what is to be rewritten"
        )
    region, file = spans[_REGION], spans.get(_FILE)
    _check_cursor(text, region)
    inside = file is not None and file.begin < region.begin < file.end
    before = after = ""
    if inside and file is not None:
        before = _without_break(text[file.start : region.begin])
        after = text[region.end : file.stop]
    return EditPrompt(
        before=before,
        region=_region(text[region.start : region.stop]),
        after=after,
        instruction=_instruction(text, spans, leave_out=_FILE if inside else _REGION),
    )


def _spans(text: str) -> dict[str, _Span]:
    """Each part by its name. The region may stand in the file; nothing else stands in another part."""
    spans: dict[str, _Span] = {}
    opened: list[tuple[str, re.Match[str]]] = []
    for tag in _TAG.finditer(text):
        name = tag[2]
        if not tag[1]:
            if name in spans or any(name == other for other, _ in opened):
                raise _wrong(f"{tag[0]} stands there twice; give it once")
            if opened and not (name == _REGION and [other for other, _ in opened] == [_FILE]):
                raise _wrong(f"{tag[0]} stands within {_open(opened[-1][0])}; close that one first")
            opened.append((name, tag))
            continue
        if not opened or opened[-1][0] != name:
            raise _wrong(f"{tag[0]} closes nothing; {_open(name)} must stand before it")
        _, begin = opened.pop()
        spans[name] = _Span(begin.start(), begin.end(), tag.start(), tag.end())
    if opened:
        raise _wrong(f"{_open(opened[-1][0])} is not closed; put {_close(opened[-1][0])} after it")
    return spans


def _check_cursor(text: str, region: _Span) -> None:
    count = text.count(_CURSOR)
    if count > 1:
        raise _wrong(f"{_CURSOR} stands there {count} times; give it once")
    if count and not region.start <= text.index(_CURSOR) < region.stop:
        raise _wrong(f"{_CURSOR} stands outside of {_open(_REGION)}; put it where the cursor is in there")


def _region(text: str) -> str:
    """Without the cursor: all of the region is examined, wherever it stands in there.

    Tags stand on lines of their own: the breaks beside them are not the region's.
    """
    text = _without_break(text.replace(_CURSOR, ""))
    for line_break in ("\r\n", "\n"):
        if text.endswith(line_break):
            return text.removesuffix(line_break)
    return text


def _without_break(text: str) -> str:
    """The text after a tag that has a line of its own."""
    for line_break in ("\r\n", "\n"):
        if text.startswith(line_break):
            return text.removeprefix(line_break)
    return text


def _instruction(text: str, spans: Mapping[str, _Span], *, leave_out: str) -> str:
    """Viewed snippets and recent changes, then the text outside of all tags: the instruction."""
    parts: list[str] = []
    for name, heading in _HEADINGS.items():
        if name in spans and name != leave_out:
            inner = _SNIPPET_TAG.sub("", text[spans[name].start : spans[name].stop]).strip("\r\n")
            parts += [f"{heading}\n{inner}"] if inner.strip() else []
    at, rest = 0, ""
    for span in sorted(spans.values(), key=lambda span: span.begin):
        rest += text[at : max(at, span.begin)]
        at = max(at, span.end)
    outside = (rest + text[at:]).strip()
    return "\n\n".join([*parts, *([outside] if outside else [])])


def _open(name: str) -> str:
    return f"<|{name}|>"


def _close(name: str) -> str:
    return f"<|/{name}|>"


def _wrong(what: str) -> ApiError:
    return invalid(f"messages: {what}.", FIELD)
