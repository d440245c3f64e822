"""Questions as they are typed (--ask, --choices, --levels), and as a file of JSON has them."""

from __future__ import annotations

import argparse
import json
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dgemma.cli.generation_options import check_text
from dgemma.cli.text_file import read_text_file
from dgemma.errors import InputError, suggestion

if TYPE_CHECKING:
    from dgemma.canvas.decide import Choice, Question

# Fields of a question by its type, as OpenAI's Decisions API has them.
_FIELDS = {
    "predicate": ("type", "name", "instructions"),
    "choice": ("type", "name", "instructions", "choices"),
    "score": ("type", "name", "instructions", "levels"),
}


class _Ask(argparse.Action):
    """A question, to which the options that follow may add what can be answered."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        asked = [*(namespace.asked or ()), {"type": "predicate", "instructions": str(values)}]
        namespace.asked = asked


class _Answers(argparse.Action):
    """Choices or levels of the question before."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if not namespace.asked:
            parser.error(f"{option_string} belongs to the --ask before it, and there is none")
        *before, last = namespace.asked
        if last["type"] != "predicate":
            parser.error(f"the question {last['instructions']!r} has its answers already")
        labels = [label.strip() for label in str(values).split(",")]
        kind, key = ("choice", "value") if option_string == "--choices" else ("score", "label")
        field = "choices" if kind == "choice" else "levels"
        namespace.asked = [*before, {**last, "type": kind, field: [{key: label} for label in labels]}]


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--ask", dest="asked", action=_Ask, metavar="QUESTION", help="is it so? May be repeated"
    )
    group.add_argument(
        "--choices",
        dest="answers",
        action=_Answers,
        metavar="A,B,...",
        help="of the --ask before: which one?",
    )
    group.add_argument(
        "--levels",
        dest="answers",
        action=_Answers,
        metavar="LOW,...,HIGH",
        help="of the --ask before: how much? The lowest first",
    )
    group.add_argument(
        "--questions", metavar="FILE.json", help="a list of questions as OpenAI's Decisions API has them"
    )


def read_questions(args: argparse.Namespace) -> list[Question]:
    """Those of the file, then those that were typed."""
    from dgemma.canvas.decide import MAX_QUESTIONS

    found = [] if args.questions is None else _from_file(args.questions)
    for number, raw in enumerate(args.asked or (), start=1):
        found.append(_question(raw, f"--ask {number}"))
    if not found:
        raise InputError("no question; give --ask, or --questions with a file of them.")
    if len(found) > MAX_QUESTIONS:
        raise InputError(f"there are {len(found)} questions; ask 1 to {MAX_QUESTIONS}.")
    names = [question.name for question in found if question.name is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two questions are called {twice!r}; rename one of them.")
    return found


def _from_file(path: str) -> list[Question]:
    text = read_text_file(path).text
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
    if isinstance(raw, dict) and isinstance(raw.get("questions"), list):  # a whole request
        raw = raw["questions"]
    if not isinstance(raw, list) or not raw:
        raise InputError(f"{path} holds no list of questions.")
    return [_question(one, f"{path}, question {number}") for number, one in enumerate(raw, start=1)]


def _question(raw: Any, where: str) -> Question:
    from dgemma.canvas.decide import Question

    if not isinstance(raw, dict):
        raise InputError(f"{where} is not an object; it needs type and instructions.")
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        guess = suggestion(str(kind), _FIELDS)
        raise InputError(f"{where}: type is {reprlib.repr(kind)}{guess} Types: {', '.join(_FIELDS)}.")
    for name in raw:
        if name not in _FIELDS[kind]:
            raise InputError(f"{where}: unknown field {name!r}{suggestion(name, _FIELDS[kind])}")
    instructions = _text(raw.get("instructions"), f"{where}: instructions")
    called = raw.get("name")
    facts: dict[str, Any] = {"kind": kind, "instructions": instructions}
    if called is not None:
        facts["name"] = _text(called, f"{where}: name")
    if kind != "predicate":
        field, key = ("choices", "value") if kind == "choice" else ("levels", "label")
        given = raw.get(field)
        if not isinstance(given, list):
            raise InputError(f"{where}: {field} is missing; give a list of 2 or more.")
        facts["choices"] = tuple(_choice(one, key, f"{where}: one of its {field}") for one in given)
    try:
        return Question(**facts)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _choice(raw: Any, key: str, where: str) -> Choice:
    from dgemma.canvas.decide import Choice

    if isinstance(raw, str):
        raw = {key: raw}
    if not isinstance(raw, dict) or key not in raw:
        raise InputError(f"{where} has no {key}.")
    for name in raw:
        if name not in (key, "description"):
            raise InputError(f"{where}: unknown field {name!r}{suggestion(name, (key, 'description'))}")
    value = raw[key]
    if not (key == "value" and isinstance(value, bool)):
        value = _text(value, f"{where}: {key}")
    about = raw.get("description")
    return Choice(value=value, description="" if about is None else _text(about, f"{where}: description"))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{what} is {reprlib.repr(value)}; it must be a text.")
    return check_text(value)
