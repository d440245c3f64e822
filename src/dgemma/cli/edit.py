"""Change a text in place, under an instruction; print the changes as a unified diff.

FILE is - for stdin. With "" for INSTRUCTION the model looks for what seems wrong, as a typo. Words are
changed one by one, and all other bytes stay. Without MODEL the bundled text model is used. A long text is
read in sections, each with some of the text around it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgemma.cli import paint
from dgemma.cli.canvas_options import MODEL, add_model_arguments, add_words, given_words, looks_like_a_model
from dgemma.cli.diff_view import diff_pieces
from dgemma.cli.generation_options import check_text, load_model
from dgemma.cli.progress import count_progress
from dgemma.cli.sections import Section, sections
from dgemma.cli.text_file import TextFile, check_writable, read_text_file, write_text_file
from dgemma.errors import InputError
from dgemma.params import GenerationParams

if TYPE_CHECKING:
    from dgemma import LanguageModel
    from dgemma.canvas.edit import Change

HELP = "change a text in place, under an instruction"
EXAMPLES = (
    "examples:\n"
    '  dgemma edit notes.md ""\n'
    '  dgemma edit notes.md "Fix the spelling." --write\n'
    '  dgemma edit MODEL notes.md "Fix the spelling." --check\n'
    '  git show HEAD:notes.md | dgemma edit - "" --json'
)
_SECTION_CANVASES = 8  # of text: so long nothing is told
_TEMPLATE_TOKENS = 64  # around an instruction and a text


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All changes of a text as the model reads it."""

    text: str
    changes: tuple[tuple[int, Change], ...] = ()  # with the start of the section each is counted from
    looked_at: int = 0
    forwards: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int | None = None
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(
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
        "--windows", type=int, metavar="N", help="places to look at, at most, per canvas of text (default: 3)"
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    words = given_words(args)
    if len(words) < 2 or (len(words) == 2 and looks_like_a_model(words[0])):
        args.parser.error('give FILE and INSTRUCTION, or MODEL, FILE and INSTRUCTION; "" is one too')
    args.model, path, instruction = [MODEL, *words][-3:]
    instruction = check_text(instruction)
    options = _options(args)
    if args.write:
        check_writable(path)
    file = read_text_file(path)
    # Nothing can be wrong in nothing, and no model is needed to say so.
    found = _edit(load_model(args), file, instruction, options) if file.text else Outcome(text="")
    changed = found.text != file.text
    if args.write and changed:
        write_text_file(file, found.text)
    if args.json:
        print(json.dumps(_told(file, found, written=args.write and changed)))
    elif args.write:
        count = len(found.changes)
        paint.show([(f"{file.name}: {count or 'no'} change{'s' * (count != 1)}\n", "")])
    else:
        paint.show(diff_pieces(file.whole(file.text), file.whole(found.text), file.name))
        if not changed and sys.stderr.isatty():
            print("dgemma edit: nothing to change", file=sys.stderr)
    return int(args.check and changed)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    from dgemma.canvas.edit import EditOptions

    options: dict[str, Any] = {}
    if args.windows is not None:
        EditOptions(windows=args.windows)
        options["windows"] = args.windows
    if args.seed is not None:
        GenerationParams.make(seed=args.seed)
        options["seed"] = args.seed
    return options


def _edit(lm: LanguageModel, file: TextFile, instruction: str, options: dict[str, Any]) -> Outcome:
    asks = bool(instruction.strip())
    if asks and not lm.has_chat_template:
        raise InputError(
            'an instruction needs the chat template, and this checkpoint has none; give "" for INSTRUCTION.'
        )
    began = time.perf_counter()
    parts = _sections(lm, file.text, instruction if asks else "")
    texts: list[str] = []
    changes: list[tuple[int, Change]] = []
    looked_at = forwards = prompt_tokens = cached_tokens = 0
    with count_progress("edit", len(parts), "sections") as advance:
        for part in parts:
            edited = lm.edit(part.text, instruction, before=part.before, behind=part.behind, **options)
            options = {**options, "seed": edited.seed}  # one for all of them
            texts.append(edited.text)
            changes += [(part.start, change) for change in edited.changes]
            looked_at += edited.looked_at
            forwards += edited.forwards
            prompt_tokens += edited.prompt_tokens
            cached_tokens += edited.cached_tokens
            advance(())
    return Outcome(
        text="".join(texts),
        changes=tuple(changes),
        looked_at=looked_at,
        forwards=forwards,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        seed=options["seed"],
        seconds=time.perf_counter() - began,
    )


def _sections(lm: LanguageModel, text: str, instruction: str) -> list[Section]:
    """As much at a time as leaves room for what stands before it and, if it is asked about, for itself."""

    def count(part: str) -> int:
        return len(lm.tokenizer.encode(part))

    canvas = lm.config.canvas_len
    room = lm.config.max_positions - 4 * canvas
    if instruction:
        room = (room - count(instruction) - _TEMPLATE_TOKENS) // 2
    most = max(canvas, min(_SECTION_CANVASES * canvas, room // 2))
    return sections(text, count, most=most, around=min(most, max(0, room // 4)))


def _told(file: TextFile, found: Outcome, *, written: bool) -> dict[str, Any]:
    return {
        "file": file.name,
        "written": written,
        "changes": [_change(file, begin, change) for begin, change in found.changes],
        "looked_at": found.looked_at,
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
