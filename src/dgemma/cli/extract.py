"""Write what a short message says as a record: an appointment, an order, a contact, and so on.

INPUT is a text, a file, @FILE or - for stdin. The record is JSON, always valid for its schema, with null for
what the message does not say. Without --type the model finds the type. "Tomorrow" counts from --today. With
--lines each line of INPUT is a message, and each line of the output its record.

The bundled model knows appointment, order, contact, measurement, log and address, in English. A schema of
your own needs a larger MODEL."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.options import (
    add_model_arguments,
    add_positionals,
    check_response_format,
    check_text,
    given_positionals,
    load_model,
    looks_like_a_model,
    read_schema,
    recording,
)
from dgemma.cli.text_file import STDIN, lines_of, read_text_file
from dgemma.cli.views.answer_view import stats
from dgemma.cli.views.terminal import printable
from dgemma.errors import InputError, suggestion
from dgemma.forms.record_types import RECORD_TYPES
from dgemma.params import GenerationParams

if TYPE_CHECKING:
    from dgemma import Extraction


MODEL = "bundled:forms"
EXAMPLES = (
    "examples:\n"
    '  dgemma extract "Lunch with Ann Hill tomorrow at noon, in Rome"\n'
    "  dgemma extract mail.txt --type order --today 2026-11-18\n"
    "  dgemma extract --lines app.log --type log > log.jsonl\n"
    "  dgemma extract MODEL - --json-schema ticket.schema.json < mail.txt"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_positionals(
        parser,
        ("INPUT", "MODEL INPUT"),
        (
            ("MODEL", f"a checkpoint directory, or a hub name (default: {MODEL})"),
            ("INPUT", "a text, a file, @FILE, or - for stdin"),
        ),
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--type", metavar="TYPE", help=f"{', '.join(RECORD_TYPES)}; or one of MODEL's own")
    what.add_argument("--json-schema", metavar="FILE", help="your own; JSON text, a file, or - for stdin")
    parser.add_argument(
        "--today", type=_date, metavar="DATE", help="what tomorrow refers to, as 2026-11-18 (default: today)"
    )
    parser.add_argument("--lines", action="store_true", help="each line of INPUT is a message")
    parser.add_argument("--json", action="store_true", help="print type, record and figures, for a program")
    parser.add_argument("--stats", action="store_true", help="tokens, seconds and steps, to stderr")
    add_model_arguments(parser, seed=0)  # a fixed seed: the same message gets the same record


def run(args: argparse.Namespace) -> int:
    positionals = given_positionals(args)
    if not positionals or (len(positionals) == 1 and looks_like_a_model(positionals[0])):
        args.parser.error("no INPUT; give INPUT, or MODEL and INPUT")
    args.model, given = [MODEL, *positionals][-2:]
    GenerationParams.make(seed=args.seed)
    schema = None
    if args.json_schema is not None:
        text = read_schema(args.json_schema, reads_stdin=given == STDIN)
        check_response_format({"json_schema": text})
        schema = json.loads(text)
    messages = _messages(given, is_lines=args.lines)
    lm = load_model(args)
    if args.type is not None and args.type not in (lm.record_types or RECORD_TYPES):
        known = list(lm.record_types or RECORD_TYPES)
        near = suggestion(args.type, known, otherwise=f": {', '.join(known)}.")
        raise InputError(f"--type {args.type!r} is none of {args.model}'s types{near}")
    with recording(lm, args.trace, "extract"):
        for number, message in enumerate(messages):
            found = lm.extract(message, args.type, json_schema=schema, today=args.today, seed=args.seed)
            if not found.is_trained and lm.record_types is not None and not number:
                print(
                    f"dgemma extract: {args.model} was not trained on this schema: the record is valid, and "
                    f"its values are mere guesses. It knows {', '.join(lm.record_types)}.",
                    file=sys.stderr,
                )
            _print(found, args)
    return 0


def _print(found: Extraction, args: argparse.Namespace) -> None:
    value: dict[str, Any] = found.record
    if args.json:
        answer = found.answer
        value = {
            "type": found.type,
            "record": found.record,
            "steps": sum(answer.steps),
            "seconds": round(answer.timings.total_s, 3),
            "seed": answer.seed,
        }
    elif args.type is None and found.type is not None:
        value = {"type": found.type, **found.record}
    is_drawn = sys.stdout.isatty() and not args.json and not args.lines
    text = json.dumps(value, ensure_ascii=not is_drawn, indent=2 if is_drawn else None)
    print(printable(text, sys.stdout.encoding) if is_drawn else text, flush=True)
    if args.stats:
        print(stats(found.answer), file=sys.stderr)


def _messages(given: str, *, is_lines: bool) -> list[str]:
    text = _input(given)
    messages = [line.rstrip("\r\n") for line in lines_of(text) if line.strip()] if is_lines else [text]
    if not any(message.strip() for message in messages):
        raise InputError(f"the input is {text!r}; it must hold some text.")
    return messages


def _input(given: str) -> str:
    if given == STDIN:
        return read_text_file(STDIN).text
    if given.startswith("@"):
        return read_text_file(given[1:]).text
    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # a text that no file could be called
        is_file = False
    if not is_file and re.fullmatch(r"\S*(/\S+|\.[a-z]{2,5})", given):  # one word, and no sentence
        raise InputError(
            f"{given!r} looks like a file, and there is none; a message may come from stdin (-)."
        )
    return read_text_file(given).text if is_file else check_text(given)


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date such as 2026-11-18") from None
