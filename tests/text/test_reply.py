"""A reply is taken apart by token ids, the same however the ids arrive."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.events import ToolCall
from dgemma.text.reply import Channel, ParsedReply, ReplyChunk, ReplyParser
from dgemma.text.tokenizer import Tokenizer
from text.bundled import TOKENIZER, bundled_added_tokens, edited_copy, ids_of

MARKERS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"]
fragments = st.sampled_from(
    [*MARKERS, "thought", "thought\n", "\n", '<|"|>', "call:f{", "a:1", "}", "€", "<turn|>", "<pad>", "word "]
)


def reply(text: str) -> ParsedReply:
    return ParsedReply.from_ids(TOKENIZER, ids_of(text))


def merged(chunks: list[ReplyChunk]) -> list[tuple[Channel, str, ToolCall | None]]:
    """Neighbours of one channel joined: the split into chunks is free."""
    result: list[tuple[Channel, str, ToolCall | None]] = []
    for chunk in chunks:
        if result and chunk.call is None and result[-1][0] is chunk.channel and result[-1][2] is None:
            result[-1] = (chunk.channel, result[-1][1] + chunk.text, None)
        else:
            result.append((chunk.channel, chunk.text, chunk.call))
    return result


@settings(deadline=None)
@given(
    st.lists(st.one_of(fragments.map(ids_of), st.integers(0, 2047).map(lambda id_: [id_])), max_size=25),
    st.lists(st.integers(0, 80)),
)
def test_any_split_gives_the_same_reply(parts: list[list[int]], cuts: list[int]) -> None:
    ids = list(itertools.chain.from_iterable(parts))
    borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    whole, split = ReplyParser(TOKENIZER), ReplyParser(TOKENIZER)
    expected = [*whole.add(ids), *whole.finish()]
    chunks = [p for start, end in itertools.pairwise(borders) for p in split.add(ids[start:end])]
    assert merged([*chunks, *split.finish()]) == merged(expected)
    assert all(chunk.text for chunk in expected if chunk.call is None)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("Hello.", "", "Hello."),
        ("<|channel>thought\nhm, so<channel|>Hello.", "hm, so", "Hello."),
        ("<|channel>thought\nhm", "hm", ""),
        ("<|channel>thought\n<channel|>Hello.", "", "Hello."),
        ("<|channel>thought<channel|>Hello.", "", "Hello."),
        ("<|channel><channel|>Hello.", "", "Hello."),
        ("<|channel>thought", "", ""),
        ("<|channel>other\nhm<channel|>a", "other\nhm", "a"),
        ("<|channel>thoughtful<channel|>a", "thoughtful", "a"),
        ("<|channel>thought\nb<channel|>c<|channel>thought\nd<channel|>e", "bd", "ce"),
        # The bare label of a model that does not think ...
        ("thought\nHello.", "", "Hello."),
        ("thought\n<|channel>thought\nb<channel|>a", "b", "a"),
        ("thought<|channel>thought\nb<channel|>a", "b", "a"),
        ("thought<channel|>a", "", "a"),
        # ... and answers that only look like it.
        ("thought", "", "thought"),
        ("thoughtful people", "", "thoughtful people"),
        ("thought experiments\n", "", "thought experiments\n"),
        ("Thought\nfor food", "", "Thought\nfor food"),
        (" thought\nfor food", "", " thought\nfor food"),
        ("tho<|channel>thought\nb<channel|>a", "b", "thoa"),
        ("a thought\nb", "", "a thought\nb"),
        ("thought\nthought\nb", "", "thought\nb"),
        # Strays leave no trace.
        ("<channel|>a<turn|>b<tool_call|>c<pad>", "", "abc"),
        ('<bos>a<|"|>b<|think|><unused7>', "", "ab"),
        ("a<|tool_response>response:f{value:1}<tool_response|>b", "", "ab"),
        ("a<|tool_response>invented", "", "a"),
    ],
)
def test_thought_and_answer(text: str, thought: str, answer: str) -> None:
    assert reply(text) == ParsedReply(thought=thought, answer=answer, tool_calls=())


def test_several_calls_between_text() -> None:
    text = 'So:<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>done'
    calls = (ToolCall(name="f", arguments={"a": "x"}), ToolCall(name="g"))
    assert reply(text) == ParsedReply(thought="", answer="So:done", tool_calls=calls)
    parser = ReplyParser(TOKENIZER)
    chunks = [*parser.add(ids_of(text)), *parser.finish()]
    calls_shown = [chunk.text for chunk in chunks if chunk.channel is Channel.TOOL_CALL]
    assert calls_shown == ['{"a": "x"}', "{}"]


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        ("<|tool_call>call:f{a:1}", 1),
        ("<|tool_call>call:f{a:1}<|tool_call>call:f{a:1}", 2),
        ("<|tool_call>call:f{a:1}<|channel>", 1),
        ("<|tool_call>call:f{a:1}<channel|>", 1),
        ("<|tool_call>call:f{a:1}<|tool_response>", 1),
    ],
)
def test_a_call_that_is_cut_off_is_never_carried_out(text: str, num_calls: int) -> None:
    calls = reply(text).tool_calls
    assert len(calls) == num_calls
    assert all("cut off" in (call.error or "") and call.arguments == {} for call in calls)


def test_a_malformed_call_is_a_piece_with_an_error() -> None:
    parser = ReplyParser(TOKENIZER)
    (chunk,) = parser.add(ids_of('<|tool_call>call:f{a:<|"|>x<tool_call|>'))
    assert chunk.call is not None
    assert chunk.call.error == 'a string is not closed by <|"|>'
    assert chunk.text == "call:f{a:x"


def test_text_that_spells_markers_is_text() -> None:
    text = "<|channel>thought\nx<channel|><|tool_call>call:f{}<tool_call|>"
    assert ParsedReply.from_ids(TOKENIZER, TOKENIZER.encode(text)).answer == text


def test_text_is_passed_on_as_it_comes() -> None:
    parser = ReplyParser(TOKENIZER)
    shown = [[chunk.text for chunk in parser.add([id_])] for id_ in TOKENIZER.encode("thou art")]
    assert shown[-1]
    assert "".join(itertools.chain.from_iterable(shown)) == "thou art"
    assert parser.finish() == []


def test_a_tokenizer_without_channels_has_answers_only(tmp_path: Path) -> None:
    tokens = [token for token in bundled_added_tokens() if "|" not in token["content"]]
    tokenizer = Tokenizer.from_directory(edited_copy(tmp_path, added_tokens=tokens))
    assert ParsedReply.from_ids(tokenizer, tokenizer.encode("thought")).answer == "thought"


def test_half_a_character_does_not_join_across_a_marker() -> None:
    first, second, third = (107 + value for value in "€".encode())
    ids = [101, first, 100, second, third]
    assert ParsedReply.from_ids(TOKENIZER, ids) == ParsedReply(
        thought="\ufffd" * 2, answer="\ufffd", tool_calls=()
    )
