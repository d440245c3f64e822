"""A task from a JSON Lines file: prompts with expected responses. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from dgemma.errors import InputError
from dgemma.events import Answer

_LINE_FORMAT = (
    'a line is {"prompt": text or messages, "response": text}, or {"messages": [...]} whose last is the '
    "assistant's"
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One line: the prompt and the expected response."""

    prompt: str | Sequence[Mapping[str, Any]]
    response: str
    groups: tuple[str, ...] = ()


class JsonlTask:
    """Compares answers with expected responses. Runs of whitespace count as one space.

    exact: the answer equals the response. contains: the answer contains the response. chars: the similarity
    of their characters, from 0 to 1 (difflib's ratio). A line may have "group", a string to report by.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = self.path.name
        self._pairs = _read(self.path)

    def examples(self) -> Sequence[Pair]:
        return self._pairs

    def prompt(self, example: Pair) -> str | Sequence[Mapping[str, Any]]:
        return example.prompt

    def groups(self, example: Pair) -> tuple[str, ...]:
        return example.groups

    def score(self, example: Pair, answer: Answer) -> dict[str, float]:
        expected, actual = _normal(example.response), _normal(answer.text)
        # autojunk would ignore frequent characters, which in prose are nearly all of them.
        ratio = SequenceMatcher(None, expected, actual, autojunk=False).ratio()
        return {"exact": float(expected == actual), "contains": float(expected in actual), "chars": ratio}


def _normal(text: str) -> str:
    return " ".join(text.split())


def _read(path: Path) -> list[Pair]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no part of the first line
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.", field="path") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 at byte {error.start}; convert it first.", field="path"
        ) from None
    pairs = [
        _pair(line, f"{path}, line {number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not pairs:
        raise InputError(f"{path} has no lines; {_LINE_FORMAT}.", field="path")
    return pairs


def _pair(line: str, where: str) -> Pair:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not JSON; {_LINE_FORMAT}.") from None
    if not isinstance(raw, dict):
        raise InputError(f"{where} is a {type(raw).__name__}; {_LINE_FORMAT}.")
    prompt: Any = raw.get("prompt")
    response: Any = raw.get("response")
    if "messages" in raw:
        if prompt is not None or response is not None:
            raise InputError(f"{where} has messages beside a prompt or response; {_LINE_FORMAT}.")
        prompt, response = _split(raw["messages"], where)
    if not isinstance(prompt, str | list) or not prompt or not _is_text(response):
        raise InputError(f"{where} has no prompt, or no response with text in it; {_LINE_FORMAT}.")
    group = raw.get("group")
    if group is not None and not isinstance(group, str):
        raise InputError(f"{where} has the group {group!r:.40}; it must be a string.")
    return Pair(prompt=prompt, response=response, groups=() if group is None else (group,))


def _split(messages: object, where: str) -> tuple[list[Any], Any]:
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if not isinstance(messages, list) or not isinstance(last, dict):
        raise InputError(f"{where} has fewer than two messages; {_LINE_FORMAT}.")
    if last.get("role") not in ("assistant", "model"):
        raise InputError(f"{where} ends with role {last.get('role')!r:.40}; {_LINE_FORMAT}.")
    return messages[:-1], last.get("content")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
