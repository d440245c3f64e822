"""Flags that say what a text shall be: a regular expression, one of some texts, JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dgemma.cli.generation_options import check_text, keep_undecodable_input
from dgemma.constraint.forms import MAX_FORM_CHARS, Json, Regex, form_of, schema_text
from dgemma.errors import InputError


def add_form_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the text shall be").add_mutually_exclusive_group()
    group.add_argument("--regex", metavar="PATTERN", help="all of it matches this regular expression")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these; repeat the option")
    group.add_argument(
        "--json-schema", metavar="SCHEMA", help="JSON of this schema: a file, -: stdin, or {...} itself"
    )
    group.add_argument("--json-object", action="store_true", help="a JSON object")


def form_options(args: argparse.Namespace, *, reads_stdin: bool) -> dict[str, Any]:
    """What was given, as the Python API takes it; checked before a large model is loaded for nothing.

    reads_stdin: it is taken, so no schema can come from there.
    """
    options: dict[str, Any] = {}
    if args.regex is not None:
        options["regex"] = check_text(args.regex)
    if args.choice is not None:
        options["choice"] = [check_text(text) for text in args.choice]
    if args.json_schema is not None:
        options["json_schema"] = _schema(args.json_schema, reads_stdin=reads_stdin)
    if args.json_object:
        options["json_object"] = True
    _check(options)
    return options


def _schema(given: str, *, reads_stdin: bool) -> str:
    if given.lstrip()[:1] == "{" or given.strip() in ("true", "false"):
        return schema_text(check_text(given), "--json-schema")
    if given == "-":
        if reads_stdin:
            raise InputError("--json-schema is -, but stdin is read for something else; give a file.")
        keep_undecodable_input()
        return schema_text(check_text(sys.stdin.read(MAX_FORM_CHARS + 1)), "--json-schema")
    try:
        with open(given, encoding="utf-8-sig", errors="surrogateescape") as file:
            text = file.read(MAX_FORM_CHARS + 1)
    except (OSError, ValueError) as error:  # a name may hold what no name can
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"--json-schema: {given[:200]} cannot be read: {why}. Give a file or JSON."
        ) from None
    return schema_text(check_text(text), f"--json-schema {given[:200]}")


def _check(options: dict[str, Any]) -> None:
    form = form_of(options)
    try:
        if isinstance(form, Regex):
            from dgemma.constraint.pattern import parse

            parse(form.pattern)
        elif isinstance(form, Json) and form.schema is not None:
            from dgemma.constraint.json_schema import schema_pattern
            from dgemma.constraint.json_text import JsonStyle

            schema_pattern(json.loads(form.schema), JsonStyle())
    except InputError as error:
        flag = "--regex" if isinstance(form, Regex) else "--json-schema"
        raise InputError(f"{flag}: {error}") from None
