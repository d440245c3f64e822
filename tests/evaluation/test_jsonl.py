"""JSON lines as a task: both shapes, three scores, and lines that are refused by their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgemma import Answer, FinishReason, InputError
from dgemma.evaluation.tasks.jsonl import JsonlTask
from dgemma.evaluation.tasks.registry import open_task

PAIR = {"prompt": "Name a colour.", "response": "deep  blue\n"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "red"},
    ],
    "group": "chats",
}


def written(path: Path, *lines: Any) -> Path:
    file = path / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def answer(text: str) -> Answer:
    return Answer(text=text, tokens=(1,), finish_reason=FinishReason.STOP, seed=0, decode="diffuse")


def test_both_shapes_of_a_line_are_read(tmp_path: Path) -> None:
    messages = {"prompt": CHAT["messages"][:2], "response": "red"}  # type: ignore[index]
    task = JsonlTask(written(tmp_path, PAIR, "", CHAT, messages))
    assert task.name == "data.jsonl"
    text, chat, also_chat = task.examples()
    assert (task.prompt(text), text.response, task.groups(text)) == ("Name a colour.", "deep  blue\n", ())
    assert (task.prompt(chat), chat.response) == (CHAT["messages"][:2], "red")  # type: ignore[index]
    assert task.groups(chat) == ("chats",)
    assert task.prompt(also_chat) == task.prompt(chat)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\ufeff" + json.dumps(PAIR), encoding="utf-8")
    assert JsonlTask(file).examples()[0].prompt == "Name a colour."


def test_a_line_separator_within_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a\u2028b", "response": "c"}, ensure_ascii=False)
    (pair,) = JsonlTask(written(tmp_path, line)).examples()
    assert pair.prompt == "a\u2028b"


@pytest.mark.parametrize(
    ("text", "exact", "contains", "chars"),
    [
        ("deep blue", 1, 1, 1),
        ("  deep\nblue ", 1, 1, 1),
        ("It is deep blue.", 0, 1, 2 * 9 / (9 + 16)),
        ("deep red", 0, 0, 2 * 6 / (9 + 8)),  # "deep " and the e of "blue"
        ("", 0, 0, 0),
    ],
)
def test_scores_leave_whitespace_aside(
    text: str, exact: float, contains: float, chars: float, tmp_path: Path
) -> None:
    task = JsonlTask(written(tmp_path, PAIR))
    (pair,) = task.examples()
    assert task.score(pair, answer(text)) == {"exact": exact, "contains": contains, "chars": chars}


def test_long_texts_are_compared_by_all_their_letters(tmp_path: Path) -> None:
    """difflib by itself leaves letters out that are frequent in texts of 200 and more."""
    prose = "the sea is salty and wide " * 20
    task = JsonlTask(written(tmp_path, {"prompt": "x", "response": prose}))
    (pair,) = task.examples()
    assert task.score(pair, answer("x" + prose))["chars"] > 0.99


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON; a line is"),
        ("[" * 100_000, "line 2 is not JSON"),
        ([1], "line 2 is a list"),
        ({"prompt": "x"}, "line 2 has no prompt, or no response with text in it"),
        ({"prompt": "x", "response": "  "}, "line 2 has no prompt, or no response with text"),
        ({"prompt": "x", "response": 7}, "line 2 has no prompt, or no response with text"),
        ({"prompt": 7, "response": "x"}, "line 2 has no prompt"),
        ({"prompt": [], "response": "x"}, "line 2 has no prompt"),
        ({"messages": CHAT["messages"], "response": "x"}, "line 2 has messages beside a prompt or response"),
        ({"messages": CHAT["messages"][:2]}, "line 2 ends with role 'user'"),  # type: ignore[index]
        ({"messages": CHAT["messages"][2:]}, "line 2 has fewer than two messages"),  # type: ignore[index]
        ({"messages": ["x", "y"]}, "line 2 has fewer than two messages"),
        ({"messages": "xy"}, "line 2 has fewer than two messages"),
        ({**PAIR, "group": 3}, "line 2 has the group 3; it must be a string"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"data.jsonl, {message}"):
        JsonlTask(written(tmp_path, PAIR, line))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.jsonl cannot be read: No such file"):
        open_task(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match=r"data.jsonl has no lines; a line is"):
        JsonlTask(written(tmp_path, "", " "))
    other = tmp_path / "latin"
    other.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InputError, match="latin is not UTF-8 at byte 15; convert it first"):
        open_task(str(other))
