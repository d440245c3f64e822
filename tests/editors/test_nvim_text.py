"""The Neovim plugin's texts, in Neovim's Lua without Neovim: bounded, whole characters, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.server.edit.prompt import EditPrompt, parse_edit_message

FILE = Path(__file__).parents[2] / "editors" / "nvim" / "lua" / "dgemma" / "text.lua"
TEXTS = st.text(st.sampled_from("a\nä€😀<|>/FIL"), max_size=30).map(str.encode)
PLAIN = st.text(st.sampled_from("a\nä€"), max_size=10).map(str.encode)


def lua() -> Any:
    from lupa import luajit21

    runtime = luajit21.LuaRuntime(encoding=None)  # bytes, as Neovim has them
    return runtime.execute(FILE.read_bytes())


TEXT: Any = lua()


@given(TEXTS, st.integers(0, 40))
def test_ends_of_a_text_are_bounded_and_have_whole_characters(text: bytes, most: int) -> None:
    tail, head = TEXT.tail(text, most), TEXT.head(text, most)
    assert text.endswith(tail)
    assert text.startswith(head)
    for part in (tail, head):
        part.decode()
        assert min(len(text), most) - 3 <= len(part) <= most


@given(st.lists(TEXTS.filter(lambda text: b"<" not in text), min_size=1, max_size=5))
def test_a_text_is_divided_at_its_marks(pieces: list[bytes]) -> None:
    assert list(TEXT.pieces(b"<FILL>".join(pieces)).values()) == pieces


@given(TEXTS, st.data())
def test_a_position_is_a_row_and_a_column_in_bytes(text: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    row, column = TEXT.position(text, at)
    assert (row, column) == (text[:at].count(b"\n"), len(text[:at].split(b"\n")[-1]))
    assert TEXT.offset(text, row) + column == at


@given(PLAIN, PLAIN, PLAIN, PLAIN)
def test_the_server_reads_an_edit_as_it_was_meant(
    instruction: bytes, before: bytes, region: bytes, after: bytes
) -> None:
    message = TEXT.edit_message(instruction, before, region, after)
    assert parse_edit_message(message.decode()) == EditPrompt(
        before=before.decode(),
        region=region.decode(),
        after=after.decode(),
        instruction=instruction.decode().strip(),
    )


@pytest.mark.parametrize(
    "tag", ["cursor", "code_to_edit", "/current_file_content", "recently_viewed_code_snippet"]
)
@pytest.mark.parametrize("place", range(4))
def test_a_tag_in_the_text_is_no_tag_of_the_message(tag: str, place: int) -> None:
    parts = [b"a", b"b", b"c", b"d"]
    parts[place] += f"<|{tag}|>".encode()
    assert TEXT.edit_message(*parts) == (None, f"<|{tag}|>".encode())
