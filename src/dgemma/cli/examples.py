"""Labelled examples: texts, and which choice of a question is right. They calibrate a model."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgemma.cli.generation_options import check_text
from dgemma.cli.text_file import lines_of, read_text_file
from dgemma.errors import InputError

if TYPE_CHECKING:
    from dgemma.canvas.decide import Question

FEWEST = 4  # two to fit on, two to look at what that did


@dataclass(frozen=True, kw_only=True)
class Example:
    input: str
    question: int
    right: int  # which of its choices


def read_examples(path: str, questions: Sequence[Question]) -> list[Example]:
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


def _example(line: str, questions: Sequence[Question], where: str) -> Example:
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
        raise InputError(f"{where}: label is missing; it says which choice is right.")
    return Example(input=text, question=number, right=_right(raw["label"], questions[number], where))


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
    told = str(label).lower() if isinstance(label, bool) else str(label)
    if isinstance(label, str | int | float) and told in labels:
        return labels.index(told)
    raise InputError(f"{where}: label is {reprlib.repr(label)}; it must be one of {', '.join(labels[:10])}.")
