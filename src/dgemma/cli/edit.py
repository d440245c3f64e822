"""Change a text in place, under an instruction; print the changes as a unified diff.

FILE is - for stdin. With "" for INSTRUCTION the model looks for likely mistakes such as typos. Single
words are changed; all other bytes stay. Without MODEL the bundled text model is used. A long text is
read in sections, each with some of the text around it."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgemma.cli.options import (
    MODEL,
    add_model_arguments,
    add_positionals,
    check_text,
    given_positionals,
    load_model,
    looks_like_a_model,
    recording,
)
from dgemma.cli.text_file import TextFile, check_writable, lines_of, read_text_file, write_text_file
from dgemma.cli.views.progress import count_progress
from dgemma.cli.views.terminal import Role, StyledText, print_styled
from dgemma.errors import InputError
from dgemma.params import GenerationParams

if TYPE_CHECKING:
    from dgemma import LanguageModel
    from dgemma.tasks.edit import Change


EXAMPLES = (
    "examples:\n"
    '  dgemma edit notes.md ""\n'
    '  dgemma edit notes.md "Fix the spelling." --write\n'
    '  dgemma edit MODEL notes.md "Fix the spelling." --check\n'
    '  git show HEAD:notes.md | dgemma edit - "" --json'
)
_SECTION_CANVASES = 8  # of text per section: no progress is reported within one
_TEMPLATE_TOKENS = 64  # around an instruction and a text


@dataclass(frozen=True, kw_only=True)
class EditResult:
    """All changes of a text as the model reads it."""

    text: str
    changes: tuple[tuple[int, Change], ...] = ()  # with the start of the section each is counted from
    num_windows: int = 0
    forwards: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int | None = None
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_positionals(
        parser,
        ("FILE INSTRUCTION", "MODEL FILE INSTRUCTION"),
        (
            ("MODEL", f"a checkpoint directory, or a hub name (default: {MODEL})"),
            ("FILE", "-: stdin"),
            ("INSTRUCTION", 'what to do; "": find what looks wrong'),
        ),
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="write FILE in place, at once or not at all")
    how.add_argument("--check", action="store_true", help="end with 1 if there would be changes")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")
    parser.add_argument(
        "--windows", type=int, metavar="N", help="windows to try, at most, per canvas of text (default: 3)"
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    positionals = given_positionals(args)
    if len(positionals) < 2 or (len(positionals) == 2 and looks_like_a_model(positionals[0])):
        args.parser.error('give FILE and INSTRUCTION, or MODEL, FILE and INSTRUCTION; "" is one too')
    args.model, path, instruction = [MODEL, *positionals][-3:]
    instruction = check_text(instruction)
    options = _options(args)
    if args.write:
        check_writable(path)
    file = read_text_file(path)
    # An empty text has no changes: load no model.
    found = EditResult(text="")
    if file.text:
        lm = load_model(args)
        with recording(lm, args.trace, "edit"):
            found = _edit(lm, file, instruction, options)
    changed = found.text != file.text
    if args.write and changed:
        write_text_file(file, found.text)
    if args.json:
        print(json.dumps(_to_json(file, found, written=args.write and changed)))
    elif args.write:
        count = len(found.changes)
        print_styled([(f"{file.name}: {count or 'no'} change{'s' * (count != 1)}\n", "")])
    else:
        print_styled(styled_diff(file.whole(file.text), file.whole(found.text), file.name))
        if not changed and sys.stderr.isatty():
            print("dgemma edit: nothing to change", file=sys.stderr)
    return int(args.check and changed)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    from dgemma.tasks.edit import EditOptions

    options: dict[str, Any] = {}
    if args.windows is not None:
        EditOptions(windows=args.windows)
        options["windows"] = args.windows
    if args.seed is not None:
        GenerationParams.make(seed=args.seed)
        options["seed"] = args.seed
    return options


def _edit(lm: LanguageModel, file: TextFile, instruction: str, options: dict[str, Any]) -> EditResult:
    asks = bool(instruction.strip())
    if asks and not lm.has_chat_template:
        raise InputError(
            'an instruction needs the chat template, and this checkpoint has none; give "" for INSTRUCTION.'
        )
    began = time.perf_counter()
    parts = _sections(lm, file.text, instruction if asks else "")
    texts: list[str] = []
    changes: list[tuple[int, Change]] = []
    num_windows = forwards = prompt_tokens = cached_tokens = 0
    with count_progress("edit", len(parts), "sections") as advance:
        for part in parts:
            edited = lm.edit(part.text, instruction, before=part.before, after=part.after, **options)
            options = {**options, "seed": edited.seed}  # one for all of them
            texts.append(edited.text)
            changes += [(part.start, change) for change in edited.changes]
            num_windows += edited.num_windows
            forwards += edited.forwards
            prompt_tokens += edited.prompt_tokens
            cached_tokens += edited.cached_tokens
            advance(())
    return EditResult(
        text="".join(texts),
        changes=tuple(changes),
        num_windows=num_windows,
        forwards=forwards,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        seed=options["seed"],
        seconds=time.perf_counter() - began,
    )


def _sections(lm: LanguageModel, text: str, instruction: str) -> list[Section]:
    """Sections so small that section, surroundings and (with an instruction) a copy fit the context."""

    def count(part: str) -> int:
        return len(lm.tokenizer.encode(part))

    canvas = lm.config.canvas_len
    capacity = lm.config.max_positions - 4 * canvas
    if instruction:
        capacity = (capacity - count(instruction) - _TEMPLATE_TOKENS) // 2
    most = max(canvas, min(_SECTION_CANVASES * canvas, capacity // 2))
    return sections(text, count, most=most, around=min(most, max(0, capacity // 4)))


def _to_json(file: TextFile, found: EditResult, *, written: bool) -> dict[str, Any]:
    return {
        "file": file.name,
        "written": written,
        "changes": [_change(file, begin, change) for begin, change in found.changes],
        "num_windows": found.num_windows,
        "forwards": found.forwards,
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "seconds": round(found.seconds, 3),
        "seed": found.seed,
    }


def _change(file: TextFile, begin: int, change: Change) -> dict[str, Any]:
    start, stop = begin + change.start, begin + change.stop
    return {
        "start": file.offset(file.text, start),
        "stop": file.offset(file.text, stop),
        "line": file.text.count("\n", 0, start) + 1,
        "column": start - file.text.rfind("\n", 0, start),
        "old": file.as_written(change.old),
        "new": file.as_written(change.new),
        "gain": change.gain,
    }


_ROLES: dict[str, Role] = {"+": "new", "-": "old", "@": "place"}


def styled_diff(old: str, new: str, name: str) -> list[StyledText]:
    """A unified diff that `patch -p1` and `git apply` accept; empty if the texts are equal."""
    diff = difflib.unified_diff(lines_of(old), lines_of(new))
    if next(diff, None) is None:
        return []
    next(diff)
    parts: list[StyledText] = [
        (f"--- {_shown('a', name)}\n", "head"),
        (f"+++ {_shown('b', name)}\n", "head"),
    ]
    for line in diff:
        whole = line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        parts.append((whole, _ROLES.get(line[0], "")))
    return parts


def _shown(side: str, name: str) -> str:
    name = f"{side}/{name.lstrip('/')}"
    if any(not char.isprintable() or char in '"\\' for char in name):
        return json.dumps(name, ensure_ascii=False)
    return f"{name}\t" if " " in name else name  # patch ends a name at a space unless a tab follows


Count = Callable[[str], int]
"""How many tokens a text has."""
_CountedText = tuple[str, int]
"""A part of a text, and its number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Section:
    start: int  # of its first character in the whole text
    text: str
    before: str = ""
    after: str = ""


def sections(text: str, count: Count, *, most: int, around: int) -> list[Section]:
    """Sections of at most `most` tokens, each between texts of at most `around`; joined they are `text`."""
    chunks = [chunk for line in lines_of(text) for chunk in _split_line(line, count, most)]
    found: list[Section] = []
    first = start = 0
    while first < len(chunks):
        last, tokens = first + 1, chunks[first][1]
        while last < len(chunks) and tokens + chunks[last][1] <= most:
            tokens += chunks[last][1]
            last += 1
        own = "".join(chunk for chunk, _ in chunks[first:last])
        before = [*_fitting(chunks, range(first - 1, -1, -1), around)]
        after = "".join(_fitting(chunks, range(last, len(chunks)), around))
        found.append(Section(start=start, text=own, before="".join(before[::-1]), after=after))
        first, start = last, start + len(own)
    return found


def _split_line(line: str, count: Count, most: int) -> Iterator[_CountedText]:
    tokens = count(line)
    if len(line) < 2 or tokens <= most:
        yield line, tokens
        return
    middle = len(line) // 2
    blank = line.find(" ", middle, -1)
    blank = line.rfind(" ", 1, middle) if blank < 0 else blank
    cut = middle if blank < 0 else blank
    yield from _split_line(line[:cut], count, most)
    yield from _split_line(line[cut:], count, most)


def _fitting(chunks: Sequence[_CountedText], order: range, most: int) -> Iterator[str]:
    """The longest prefix of `order` whose chunks together have at most `most` tokens."""
    for number in order:
        chunk, tokens = chunks[number]
        most -= tokens
        if most < 0:
            return
        yield chunk
