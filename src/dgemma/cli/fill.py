"""Fill the gaps of a text (infilling), conditioned on the text before and after each gap.

FILE (- is stdin) marks each gap with <FILL>, or --line and --column name one place. Gaps are filled from
first to last: each is conditioned on all text before it, fills included, and on the text after it up to the
next gap.
Without MODEL the bundled text model is used. The whole text is printed; bytes outside the gaps stay."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgemma.cli.options import (
    MODEL,
    add_model_arguments,
    add_positionals,
    add_response_format_arguments,
    check_text,
    given_positionals,
    load_model,
    looks_like_a_model,
    recording,
    response_format_options,
)
from dgemma.cli.text_file import TextFile, check_writable, read_text_file, write_text_file
from dgemma.cli.views.progress import count_progress
from dgemma.cli.views.terminal import StyledText, print_styled
from dgemma.errors import InputError
from dgemma.params import PRESETS, GenerationParams

if TYPE_CHECKING:
    from dgemma import LanguageModel
    from dgemma.tasks.infill import Filled

EXAMPLES = (
    "--only prints one line per gap, in which \\n, \\r and \\\\ stand for line breaks and backslashes:\n"
    "printf %b gives back the text.\n"
    "\n"
    "examples:\n"
    "  echo 'def add(a, b): return <FILL>' | dgemma fill -\n"
    "  dgemma fill notes.md --write --seed 7\n"
    "  dgemma fill MODEL poem.txt --marker '[...]' --max-tokens 100 --json\n"
    "  dgemma fill main.py --line 12 --column 5 --lengths 2-8,12 --only\n"
    "  dgemma fill letter.txt --regex '[0-9]{1,2} (May|June)'"
)
MARKER = "<FILL>"
# Upper bound of the mean characters per token: text beyond the model's context is not tokenized.
_CHARS_PER_TOKEN = 16
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


@dataclass(frozen=True, kw_only=True)
class FilledGap:
    """The fill of one gap, and its span in the result text."""

    start: int
    stop: int
    filled: Filled
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_positionals(
        parser,
        ("FILE", "MODEL FILE"),
        (("MODEL", f"a checkpoint directory, or a hub name (default: {MODEL})"), ("FILE", "-: stdin")),
    )
    where = parser.add_argument_group("where the gaps are")
    where.add_argument("--marker", metavar="TEXT", help=f"what marks a gap (default: {MARKER})")
    where.add_argument("--line", type=int, metavar="N", help="fill one gap in this line, counted from 1")
    where.add_argument(
        "--column", type=int, metavar="N", help="before its Nth character (default: at the line's end)"
    )
    how = parser.add_argument_group("how they are filled")
    how.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of a gap (default: 40)")
    how.add_argument(
        "--lengths",
        type=_lengths,
        metavar="LIST",
        help="tokens to try, as 2-8,12 (default: 1 to --max-tokens)",
    )
    how.add_argument("--keep", type=int, metavar="N", help="lengths that go on after one step (default: 4)")
    how.add_argument(
        "--drafts",
        type=int,
        metavar="N",
        help="texts written left to right whose beginnings are tried too (default: 8)",
    )
    how.add_argument(
        "--no-heal", action="store_true", help="keep the tokens at the gap's borders (no token healing)"
    )
    how.add_argument(
        "--method", choices=("lengths", "prompt"), help="try lengths, or ask in the chat template"
    )
    how.add_argument("--preset", choices=PRESETS, help="a trade of speed for care")
    how.add_argument(
        "--max-denoising-steps", type=int, metavar="N", help="most steps per canvas (default: 48)"
    )
    how.add_argument("--temperature", type=float, metavar="T", help="0: argmax (default: 1)")
    add_response_format_arguments(parser)
    out = parser.add_argument_group("what comes out").add_mutually_exclusive_group()
    out.add_argument("--only", action="store_true", help="print the fills alone, one per line")
    out.add_argument("--json", action="store_true", help="print one JSON object for a program")
    parser.add_argument("--write", action="store_true", help="write FILE in place, at once or not at all")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    positionals = given_positionals(args)
    if not positionals or (len(positionals) == 1 and looks_like_a_model(positionals[0])):
        args.parser.error("no FILE; give FILE, or MODEL and FILE")
    args.model, path = [MODEL, *positionals][-2:]
    if args.write:
        check_writable(path)
    response_format = response_format_options(args, reads_stdin=path == "-")
    file = read_text_file(path)
    parts = _parts(args, file)
    options = {**_options(args, len(parts) - 1), **response_format}
    lm = load_model(args)
    with recording(lm, args.trace, "fill"):
        text, gaps = _fill(lm, parts, options)
    if args.write:
        write_text_file(file, text)
    if args.json:
        print(json.dumps(_to_json(file, text, gaps, written=args.write)))
    elif args.only:
        lines = (file.as_written(gap.filled.text).translate(_ESCAPES) for gap in gaps)
        print_styled([(f"{line}\n", "") for line in lines])
    elif args.write:
        print_styled([(f"{file.name}: {len(gaps)} gap{'s' * (len(gaps) != 1)} filled\n", "")])
    else:
        print_styled(_styled_parts(file, text, gaps))
    return 0


def _parts(args: argparse.Namespace, file: TextFile) -> list[str]:
    """The text around the gaps: one part more than there are gaps."""
    if args.line is not None:
        if args.marker is not None:
            raise InputError("--marker and --line both locate the gaps; give one of them.")
        at = _place(file, args.line, args.column)
        return [file.text[:at], file.text[at:]]
    if args.column is not None:
        raise InputError("--column needs --line.")
    marker = MARKER if args.marker is None else check_text(args.marker)
    if not marker:
        raise InputError("--marker is empty; give the text that marks a gap.")
    parts = file.text.split(marker)
    if len(parts) < 2:
        raise InputError(f"{file.name} has no {marker} in it; mark the gaps, or give --line and --column.")
    return parts


def _place(file: TextFile, line: int, column: int | None) -> int:
    lines = file.text.split("\n")
    if not 1 <= line <= len(lines):
        raise InputError(f"--line is {line}; {file.name} has lines 1 to {len(lines)}.")
    found = lines[line - 1].removesuffix("\r")
    end = len(found) + 1
    if column is not None and not 1 <= column <= end:
        raise InputError(f"--column is {column}; in line {line} of {file.name} it can be 1 to {end}.")
    return sum(len(before) + 1 for before in lines[: line - 1]) + (column or end) - 1


def _options(args: argparse.Namespace, num_gaps: int) -> dict[str, Any]:
    """The options that were given, checked before a large model is loaded."""
    from dgemma.tasks.infill import FillOptions

    search = {
        "max_tokens": args.max_tokens,
        "lengths": args.lengths,
        "keep": args.keep,
        "drafts": args.drafts,
        "heal": False if args.no_heal else None,
        "method": args.method,
    }
    sampling = {
        "seed": args.seed,
        "preset": args.preset,
        "max_denoising_steps": args.max_denoising_steps,
        "temperature": args.temperature,
    }
    search = {name: value for name, value in search.items() if value is not None}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    FillOptions(**search)
    GenerationParams.make(**sampling)
    if args.seed is not None:
        GenerationParams.make(seed=args.seed + num_gaps - 1)
    return {**search, **sampling}


def _fill(lm: LanguageModel, parts: list[str], options: dict[str, Any]) -> tuple[str, list[FilledGap]]:
    """The whole text, and its gaps. With a seed, each gap has the next one."""
    near = _CHARS_PER_TOKEN * lm.config.max_positions
    text, gaps = parts[0], []
    with count_progress("fill", len(parts) - 1, "gaps") as advance:
        for number, after in enumerate(parts[1:]):
            seed = {"seed": options["seed"] + number} if "seed" in options else {}
            began = time.perf_counter()
            try:
                filled = lm.fill(text[-near:], after[:near], **{**options, **seed})
            except InputError as error:
                which = f"gap {number + 1} of {len(parts) - 1}: " if len(parts) > 2 else ""
                raise InputError(f"{which}{error}") from None
            seconds = time.perf_counter() - began
            gaps.append(
                FilledGap(start=len(text), stop=len(text) + len(filled.text), filled=filled, seconds=seconds)
            )
            text += filled.text + after
            advance(())
    return text, gaps


def _styled_parts(file: TextFile, text: str, gaps: list[FilledGap]) -> list[StyledText]:
    parts: list[StyledText] = [(file.whole(""), "")]
    at = 0
    for gap in gaps:
        parts += [(file.as_written(text[at : gap.start]), ""), (file.as_written(gap.filled.text), "new")]
        at = gap.stop
    return [*parts, (file.as_written(text[at:]), "")]


def _to_json(file: TextFile, text: str, gaps: list[FilledGap], *, written: bool) -> dict[str, Any]:
    return {
        "file": file.name,
        "written": written,
        "text": file.whole(text),
        "gaps": [
            {
                "start": file.offset(text, gap.start),
                "stop": file.offset(text, gap.stop),
                "text": file.as_written(gap.filled.text),
                "log_likelihood": _number(gap.filled.log_likelihood),
                "candidates": [
                    {
                        "text": file.as_written(candidate.text),
                        "log_likelihood": _number(candidate.log_likelihood),
                    }
                    for candidate in gap.filled.candidates
                ],
                "forwards": gap.filled.forwards,
                "prompt_tokens": gap.filled.prompt_tokens,
                "cached_tokens": gap.filled.cached_tokens,
                "seconds": round(gap.seconds, 3),
                "seed": gap.filled.seed,
            }
            for gap in gaps
        ],
    }


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _lengths(text: str) -> tuple[int, ...]:
    """`2-8,12`"""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 12:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths such as 2-8,12")
        end = int(last) if dash else int(first)
        if end - int(first) > 4096:
            raise argparse.ArgumentTypeError(f"{part!r} are too many lengths")
        found += range(int(first), end + 1)
    return tuple(dict.fromkeys(found))
