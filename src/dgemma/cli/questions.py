"""Questions as they are typed (--ask, --choices, --levels), and as a file of JSON has them."""

from __future__ import annotations

import argparse
import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgemma.cli.options import check_text
from dgemma.cli.text_file import lines_of, read_text_file
from dgemma.errors import InputError, suggestion

if TYPE_CHECKING:
    from dgemma.tasks.decide import Choice, Question


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
        typed = [*(namespace.typed or ()), {"type": "predicate", "instructions": str(values)}]
        namespace.typed = typed


class _Answers(argparse.Action):
    """Choices or levels of the question before."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if not namespace.typed:
            parser.error(f"{option_string} belongs to the --ask before it, and there is none")
        *before, last = namespace.typed
        if last["type"] != "predicate":
            parser.error(f"the question {last['instructions']!r} has its answers already")
        labels = [label.strip() for label in str(values).split(",")]
        kind, key = ("choice", "value") if option_string == "--choices" else ("score", "label")
        field = "choices" if kind == "choice" else "levels"
        namespace.typed = [*before, {**last, "type": kind, field: [{key: label} for label in labels]}]


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--ask", dest="typed", action=_Ask, metavar="QUESTION", help="is it so? May be repeated"
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
    from dgemma.tasks.decide import MAX_QUESTIONS

    found = [] if args.questions is None else _from_file(args.questions)
    for number, raw in enumerate(args.typed or (), start=1):
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
    from dgemma.tasks.decide import Question

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
    from dgemma.tasks.decide import Choice

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


FEWEST = 4  # two to fit on, two held out


@dataclass(frozen=True, kw_only=True)
class LabelledExample:
    input: str
    question: int
    right: int  # which of its choices


def read_examples(path: str, questions: Sequence[Question]) -> list[LabelledExample]:
    """JSON lines: {"input": ..., "question": index or name, "label": ...}."""
    found = [
        _example(line, questions, f"{path}, line {number}")
        for number, line in enumerate(lines_of(read_text_file(path).text), start=1)
        if line.strip()
    ]
    if len(found) < FEWEST:
        raise InputError(
            f"{path} has {len(found)} examples; {FEWEST} are the fewest, and hundreds are better: "
            "half of them are held out."
        )
    return found


def _example(line: str, questions: Sequence[Question], where: str) -> LabelledExample:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise InputError(f"{where} is not an object; it needs input and label.")
    text = raw.get("input")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: input is {reprlib.repr(text)}; it must be a text.")
    text = check_text(text)
    number = _number(raw.get("question", 0), questions, where)
    if "label" not in raw:
        raise InputError(f"{where}: label is missing; it names the right choice.")
    return LabelledExample(input=text, question=number, right=_right(raw["label"], questions[number], where))


def _number(which: Any, questions: Sequence[Question], where: str) -> int:
    names = [question.name for question in questions]
    if isinstance(which, str) and which in names:
        return names.index(which)
    if isinstance(which, int) and not isinstance(which, bool) and 0 <= which < len(questions):
        return which
    known = ", ".join(repr(name) for name in names if name is not None)
    raise InputError(
        f"{where}: question is {reprlib.repr(which)}; it must be 0 to {len(questions) - 1}"
        f"{f', or a name: {known}' if known else ''}."
    )


def _right(label: Any, question: Question, where: str) -> int:
    labels = [choice.label for choice in question.choices]
    if question.kind == "predicate" and isinstance(label, bool):
        return 0 if label else 1
    text = str(label).lower() if isinstance(label, bool) else str(label)
    if isinstance(label, str | int | float) and text in labels:
        return labels.index(text)
    raise InputError(f"{where}: label is {reprlib.repr(label)}; it must be one of {', '.join(labels[:10])}.")
