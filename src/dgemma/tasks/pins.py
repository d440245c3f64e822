"""Pins and a starting canvas as users write them -> `PinnedTokens`.

Python, HTTP and the command line take the same objects (`dgemma.params.Pin`, `StartingCanvas`), and this file
alone checks them. Positions count tokens of the answer; spans of a text count its characters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeGuard

from dgemma.engine.request import PinnedTokens, TokenIds
from dgemma.errors import InputError, suggestion

Encode = Callable[[str], Sequence[int]]
BytesOf = Callable[[int], bytes | None]

MAX_PINS = 4096
MAX_TEXTS = 4096  # of all pins together: each is tokenized
MAX_SPANS = 4096

_KINDS = ("text", "token_ids", "any_of")


def check_pins(pins: object, canvas: object) -> None:
    """Raise for a wrong form; tokens are not looked at."""
    # A mapping is Python's short form: its keys are positions, which JSON does not have.
    if pins is not None and not (isinstance(pins, Mapping) and all(isinstance(at, int) for at in pins)):
        for _ in _checked_pins(pins):
            pass
    if canvas is not None:
        _checked_canvas(canvas)


def pinned_tokens(pins: object, canvas: object, encode: Encode, bytes_of: BytesOf) -> PinnedTokens | None:
    """What is pinned of an answer; None: nothing.

    encode: the ids of a text. bytes_of: what a token adds to a text.
    """
    check_pins(pins, canvas)
    if pins is None:
        found = PinnedTokens()
    elif isinstance(pins, Mapping):
        found = PinnedTokens.from_pins(pins) or PinnedTokens()
    else:
        found = _read_pins(pins, encode)
    if canvas is not None:
        found = _with_canvas(found, _checked_canvas(canvas), encode, bytes_of)
    return found or None


def _read_pins(pins: object, encode: Encode) -> PinnedTokens:
    fixed: dict[int, int] = {}
    among: dict[int, TokenIds] = {}
    owners: dict[int, str] = {}
    for path, pin in _checked_pins(pins):
        at = pin["at"]
        if "any_of" in pin:
            options = enumerate(pin["any_of"])
            tokens = {_single_token(option, f"{path}.any_of.{n}", encode) for n, option in options}
            among[at] = tuple(sorted(tokens))
            taken = range(at, at + 1)
        else:
            tokens_there = _ids_of(pin, path, encode)
            taken = range(at, at + len(tokens_there))
            fixed |= zip(taken, tokens_there, strict=True)
        for position in taken:
            if position in owners:
                raise _wrong(path, f"stands at position {position}, which {owners[position]} has; move one.")
            owners[position] = path
    return PinnedTokens(fixed=fixed, among=among)


def _with_canvas(
    pins: PinnedTokens, canvas: Mapping[str, Any], encode: Encode, bytes_of: BytesOf
) -> PinnedTokens:
    tokens = _ids_of(canvas, "canvas", encode)
    spans = canvas.get("read_only", ())
    text = canvas.get("text")
    length, unit = (len(tokens), "tokens") if text is None else (len(text), "characters")
    for number, (_, end) in enumerate(spans):
        if end > length:
            raise _wrong(
                f"canvas.read_only.{number}", f"ends at {end}; the canvas given has {length} {unit}."
            )
    if text is not None and spans:
        spans = list(_token_spans(text, [bytes_of(token) or b"" for token in tokens], spans))
    held = _positions(spans)
    both = sorted(held & pins.choices.keys())
    if both:
        raise _wrong("canvas.read_only", f"holds position {both[0]}, which is pinned; leave out one of them.")
    return PinnedTokens(
        fixed={**pins.fixed, **{position: tokens[position] for position in held}},
        among=pins.among,
        begin=dict(enumerate(tokens)),
    )


def _positions(spans: Sequence[Sequence[int]]) -> set[int]:
    """What the spans hold. Each position is visited once, however many of them overlap."""
    held: set[int] = set()
    done = 0
    for begin, end in sorted((begin, end) for begin, end in spans):
        held.update(range(max(begin, done), end))
        done = max(done, end)
    return held


def _token_spans(
    text: str, token_bytes: Sequence[bytes], spans: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Spans of characters as spans of tokens. A token that is cut belongs to the span as a whole."""
    if b"".join(token_bytes) != text.encode():
        raise _wrong(
            "canvas.read_only",
            "counts characters of the text, but this tokenizer changes them; give the canvas as token_ids.",
        )
    offsets = [0, *accumulate(len(character.encode()) for character in text)]
    ends = list(accumulate(map(len, token_bytes)))
    for begin, end in spans:
        yield bisect_right(ends, offsets[begin]), bisect_left(ends, offsets[end]) + 1


def _ids_of(given: Mapping[str, Any], path: str, encode: Encode) -> Sequence[int]:
    if "text" not in given:
        found: Sequence[int] = given["token_ids"]
        return found
    tokens = _encoded(given["text"], f"{path}.text", encode)
    if not tokens:
        raise _wrong(f"{path}.text", "has no tokens; give some text.")
    return tokens


def _single_token(option: str | int, path: str, encode: Encode) -> int:
    if isinstance(option, int):
        return option
    tokens = _encoded(option, path, encode)
    if len(tokens) != 1:
        raise _wrong(
            path,
            f"is {option[:40]!r}, which has {len(tokens)} tokens; an alternative is one token. Give texts "
            "of one token, or token ids.",
        )
    return tokens[0]


def _encoded(text: str, path: str, encode: Encode) -> Sequence[int]:
    try:
        return encode(text)
    except InputError as error:
        raise InputError(f"{path}: {error}", field=_field(path), code=error.code) from None


# The form


def _checked_pins(pins: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each pin with its path."""
    if not _is_list(pins):
        raise _wrong("pins", f"is {_shown(pins)}; give a list of pins, or in Python a mapping of positions.")
    if len(pins) > MAX_PINS:
        raise _wrong("pins", f"has {len(pins)} pins; at most {MAX_PINS} are taken.")
    num_texts = 0
    for number, pin in enumerate(pins):
        path = f"pins.{number}"
        pin = _entries(pin, path, ("at", *_KINDS))
        if "at" not in pin:
            raise _wrong(f"{path}.at", "is missing; give the position of the first token, from 0.")
        if not _is_whole(pin["at"]):
            raise _wrong(f"{path}.at", f"is {_shown(pin['at'])}; it must be a whole number of 0 or more.")
        kind = _only_kind(pin, path, _KINDS)
        if kind == "any_of":
            _check_alternatives(pin["any_of"], f"{path}.any_of")
        num_texts += sum(isinstance(text, str) for text in pin.get("any_of", [pin.get("text")]))
        if num_texts > MAX_TEXTS:
            raise _wrong("pins", f"has more than {MAX_TEXTS} texts; give token ids.")
        yield path, pin


def _check_alternatives(options: object, path: str) -> None:
    if not _is_list(options) or not options:
        raise _wrong(path, f"is {_shown(options)}; give a list of texts or token ids.")
    for number, option in enumerate(options):
        if not isinstance(option, str) and not _is_whole(option):
            raise _wrong(f"{path}.{number}", f"is {_shown(option)}; give a text of one token, or a token id.")


def _checked_canvas(canvas: object) -> Mapping[str, Any]:
    given = {"text": canvas} if isinstance(canvas, str) else canvas
    found = _entries(given, "canvas", ("text", "token_ids", "read_only"))
    _only_kind(found, "canvas", ("text", "token_ids"))
    _check_spans(found.get("read_only", ()), "canvas.read_only")
    return found


def _check_spans(spans: object, path: str) -> None:
    if not _is_list(spans):
        raise _wrong(path, f"is {_shown(spans)}; give a list of [begin, end].")
    if len(spans) > MAX_SPANS:
        raise _wrong(path, f"has {len(spans)} spans; at most {MAX_SPANS} are taken.")
    for number, span in enumerate(spans):
        if not _is_list(span) or len(span) != 2 or not all(map(_is_whole, span)) or span[0] >= span[1]:
            raise _wrong(
                f"{path}.{number}", f"is {_shown(span)}; give [begin, end] with begin below end, from 0."
            )


def _entries(given: object, path: str, known: Sequence[str]) -> Mapping[str, Any]:
    """The entries of an object; null means absent."""
    if not isinstance(given, Mapping):
        raise _wrong(path, f"is {_shown(given)}; give an object with {', '.join(known)}.")
    for name in given:
        if name not in known:
            name = str(name)[:60]
            raise _wrong(f"{path}.{name}", f"is unknown{suggestion(name, known)} Known: {', '.join(known)}.")
    return {name: value for name, value in given.items() if value is not None}


def _only_kind(given: Mapping[str, Any], path: str, kinds: Sequence[str]) -> str:
    present = [kind for kind in kinds if kind in given]
    if len(present) != 1:
        what = " and ".join(present) or "none"
        raise _wrong(path, f"has {what} of {', '.join(kinds)}; give one of them.")
    (kind,) = present
    value, inner = given[kind], f"{path}.{kind}"
    if kind == "text" and (not isinstance(value, str) or not value):
        raise _wrong(inner, f"is {_shown(value)}; give a text that is not empty.")
    if kind == "token_ids" and (not _is_list(value) or not value or not all(map(_is_whole, value))):
        raise _wrong(inner, f"is {_shown(value)}; give a list of token ids.")
    return kind


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _field(path: str) -> str:
    return path.partition(".")[0]


def _wrong(path: str, rule: str) -> InputError:
    return InputError(f"{path} {rule}", field=_field(path))
