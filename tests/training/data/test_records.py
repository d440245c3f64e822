"""A record's examples hold what it says, are cut where they must be, and faults in it are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.text.reply_spans import reply_spans
from dgemma.text.tokenizer import Tokenizer
from dgemma.training.data.records import RecordReader, RecordReading, SkipReason, Span, TrainingExample, clip
from text.bundled import DIRECTORY, RICH, TEMPLATE, TOKENIZER, edited_copy, ids_of
from text.released_style import LARGE

CHAT = RecordReader(tokenizer=TOKENIZER, template=TEMPLATE)
RAW = RecordReader(tokenizer=TOKENIZER, template=TEMPLATE, prompt_format="raw")
TOKENS = RecordReader()
SMALL_VOCABULARY = RecordReader(vocab_size=9)
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
EXAMPLE = TrainingExample(tuple(range(10)), (Span(2, 4), Span(6, 10)))


def shown(reading: RecordReading) -> list[str]:
    """The text of each example, with its responses in [[ ]]."""
    lines = []
    for example in reading.examples:
        line, end = "", 0
        for span in example.responses:
            line += TOKENIZER.decode(example.tokens[end : span.start], controls=True)
            line += "[[" + TOKENIZER.decode(example.tokens[span.start : span.stop], controls=True) + "]]"
            end = span.stop
        lines.append(line + TOKENIZER.decode(example.tokens[end:], controls=True))
    return lines


@pytest.mark.parametrize(
    ("reader", "record", "expected"),
    [
        (CHAT, {"messages": MESSAGES}, "<bos><|turn>user\na<turn|>\n<|turn>model\n[[x<turn|>]]"),
        (CHAT, {"prompt": "a", "response": "x"}, "<bos><|turn>user\na<turn|>\n<|turn>model\n[[x<turn|>]]"),
        (CHAT, {"prompt": "a", "completion": ""}, "<bos><|turn>user\na<turn|>\n<|turn>model\n[[<turn|>]]"),
        (RAW, {"prompt": "a <eos>", "response": " x"}, "<bos>a <eos>[[ x<eos>]]"),
        (RAW, {"prompt": "", "completion": ""}, "<bos>[[<eos>]]"),
        (RecordReader(tokenizer=TOKENIZER), {"prompt": "a", "response": "x"}, "<bos>a[[x<eos>]]"),
        (CHAT, {"text": "a\n<turn|>"}, "<bos>[[a\n<turn|><eos>]]"),
        (CHAT, {"text": ""}, "<bos>[[<eos>]]"),
        (CHAT, {"text": "a", "id": 7, "source": "s", "meta": {}, "metadata": []}, "<bos>[[a<eos>]]"),
        (CHAT, {"text": "a", "messages": None, "other": None}, "<bos>[[a<eos>]]"),
        (RecordReader(tokenizer=TOKENIZER, ignored_keys=("k",)), {"text": "a", "k": 1}, "<bos>[[a<eos>]]"),
        (
            RecordReader(tokenizer=TOKENIZER, ignored_keys=("prompt",)), {"text": "a", "prompt": "b"},
            "<bos>[[a<eos>]]",
        ),
    ],
    ids=range(12),
)  # fmt: skip
def test_each_form_says_what_is_learned(reader: RecordReader, record: Any, expected: str) -> None:
    assert shown(reader.read(record)) == [expected]


def test_a_raw_prompt_is_that_of_generate() -> None:
    """`lm.generate` puts a bos before a prompt; prompt and response are encoded apart."""
    (example,) = RAW.read({"prompt": "a\n", "response": "\nb"}).examples
    bos, eos = ids_of("<bos><eos>")
    assert example.tokens == (bos, *TOKENIZER.encode("a\n"), *TOKENIZER.encode("\nb"), eos)
    assert example.tokens != tuple(ids_of("<bos>a\n\nb<eos>"))


def test_of_a_prompt_of_messages_only_the_response_is_learned() -> None:
    prompt = [*MESSAGES, {"role": "user", "content": "b"}]
    (line,) = shown(CHAT.read({"prompt": prompt, "response": "y"}))
    assert line.endswith("x<turn|>\n<|turn>user\nb<turn|>\n<|turn>model\n[[y<turn|>]]")
    assert line.count("[[") == 1


@pytest.mark.parametrize(("reader", "end"), [(CHAT, "<turn|>"), (RAW, "<eos>")])
def test_a_canvas_of_its_own_ends_as_the_response_and_is_read_by_nobody(
    reader: RecordReader, end: str
) -> None:
    record = {"prompt": "a", "response": "x"}
    (plain,), (example,) = (reader.read(r).examples for r in (record, {**record, "canvas": "x   y"}))
    assert (example.tokens, example.responses) == (plain.tokens, plain.responses)
    assert example.canvas == tuple(ids_of("x   y" + end))
    assert plain.canvas is None
    short = clip(example, len(example.tokens) - 1)
    assert isinstance(short, TrainingExample)
    assert short.canvas == example.canvas


def test_chats_become_what_reply_spans_finds() -> None:
    chat = [*MESSAGES, {"role": "user", "content": "b"}, {"role": "assistant", "content": "y"}]
    reader = RecordReader(tokenizer=TOKENIZER, template=LARGE)
    assert [
        (example.tokens, tuple((span.start, span.stop) for span in example.responses))
        for example in reader.read({"messages": chat}).examples
    ] == [(found.tokens, found.replies) for found in reply_spans(LARGE, chat)]
    assert len(reader.read({"messages": chat}).examples) == 2


@pytest.mark.parametrize(
    ("default", "said", "meant"), [(False, None, False), (True, None, True), (True, False, False)]
)
def test_thinking_is_the_records_or_else_the_readers(default: bool, said: Any, meant: bool) -> None:
    reader = RecordReader(tokenizer=TOKENIZER, template=RICH, thinking=default)
    (line,) = shown(reader.read({"messages": MESSAGES, "thinking": said}))
    assert ("<|think|>" in line) == meant


def test_tools_reach_the_template() -> None:
    reader = RecordReader(tokenizer=TOKENIZER, template=RICH)
    tools = [{"type": "function", "function": {"name": "look", "description": "d"}}]
    for record in ({"messages": MESSAGES, "tools": tools}, {"prompt": "a", "response": "x", "tools": tools}):
        assert "declaration:look" in shown(reader.read(record))[0]


def test_tokens_are_taken_as_they_are() -> None:
    record = {"tokens": [5, 6, 7, 8], "responses": [[1, 2], [3, 4]], "clipped": True}
    example = TrainingExample((5, 6, 7, 8), (Span(1, 2), Span(3, 4)), clipped=True)
    assert TOKENS.read(record).examples == (example,)
    assert TOKENS.read(example).examples == (example,)


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [
        (None, EXAMPLE),
        (10, EXAMPLE),
        (9, TrainingExample(tuple(range(9)), (Span(2, 4), Span(6, 9)), clipped=True)),
        (7, TrainingExample(tuple(range(7)), (Span(2, 4), Span(6, 7)), clipped=True)),
        (
            6,
            TrainingExample(tuple(range(4)), (Span(2, 4),)),
        ),  # what is read only, behind all that is learned, goes
        (4, TrainingExample(tuple(range(4)), (Span(2, 4),))),
        (3, TrainingExample(tuple(range(3)), (Span(2, 3),), clipped=True)),
        (2, SkipReason.PROMPT_TOO_LONG),
    ],
)
def test_what_lies_after_max_length_is_cut_off(max_length: int | None, expected: Any) -> None:
    assert clip(EXAMPLE, max_length) == expected


@given(st.data())
def test_a_cut_example_is_a_beginning_and_says_if_its_response_went_on(data: st.DataObject) -> None:
    borders = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=8, unique=True).map(sorted))
    spans = tuple(Span(a, b) for a, b in zip(borders[::2], borders[1::2], strict=False))
    example = TrainingExample(tuple(range(data.draw(st.integers(spans[-1].stop, 45)))), spans)
    max_length = data.draw(st.integers(2, 50))
    cut = clip(example, max_length)
    learned = {place for span in spans for place in range(span.start, span.stop) if place < max_length}
    if not isinstance(cut, TrainingExample):
        assert not learned
        return
    assert len(cut.tokens) <= max_length
    assert cut.tokens == example.tokens[: len(cut.tokens)]
    assert learned == {place for span in cut.responses for place in range(span.start, span.stop)}
    assert cut.clipped == any(span.start < max_length < span.stop for span in spans)


def test_a_clipped_example_stays_clipped_unless_its_end_was_cut_off() -> None:
    clipped = TrainingExample(tuple(range(10)), (Span(2, 4), Span(6, 10)), clipped=True)
    assert [clip(clipped, n).clipped for n in (12, 10, 8, 5)] == [True, True, True, False]  # type: ignore[union-attr]


def test_a_prompt_that_fills_max_length_is_skipped_with_a_reason() -> None:
    reader = RecordReader(max_length=4)
    assert reader.read(TrainingExample((1, 2, 3, 4, 5), (Span(4, 5),))) == RecordReading(
        examples=(), skipped=(SkipReason.PROMPT_TOO_LONG,)
    )


def test_of_several_replies_those_with_room_remain() -> None:
    chat = [*MESSAGES, {"role": "user", "content": "b"}, {"role": "assistant", "content": "y"}]
    whole = RecordReader(tokenizer=TOKENIZER, template=LARGE).read({"messages": chat})
    reader = RecordReader(tokenizer=TOKENIZER, template=LARGE, max_length=len(whole.examples[0].tokens))
    assert reader.read({"messages": chat}) == RecordReading(
        examples=whole.examples[:1], skipped=(SkipReason.PROMPT_TOO_LONG,)
    )


@pytest.mark.parametrize(
    ("reader", "record", "problem"),
    [
        (CHAT, [1], "the record is of type list; give an object"),
        (CHAT, {}, "keys messages, prompt, text, tokens, conversations, instruction; it has none of them"),
        (CHAT, {"text": "a", "prompt": "b"}, "both 'prompt' and 'text'. Name those .* in ignored_keys"),
        (CHAT, {"txt": "a"}, "it has none of them"),
        (CHAT, {"prompt": "a", "respons": "b"}, "unknown key 'respons'; did you mean 'response'"),
        (CHAT, {"text": "a", "weight": 1}, "the unknown key 'weight'. Remove it, or name it in ignored_keys"),
        (CHAT, {"text": "a", 7: 1}, "the unknown key '7'. Remove it"),
        (CHAT, {"messages": MESSAGES, "response": "b"}, "unknown key 'response'"),
        (CHAT, {"prompt": "a"}, "'prompt' and no response; give the text to learn"),
        (CHAT, {"prompt": "a", "response": "b", "completion": "c"}, "'prompt' and two responses"),
        (CHAT, {"prompt": "a", "response": 7}, "response is of type int; give a string"),
        (CHAT, {"prompt": "a", "response": "b", "canvas": 7}, "canvas is of type int; give a string"),
        (CHAT, {"text": "a", "canvas": "b"}, "unknown key 'canvas'"),
        (CHAT, {"prompt": 7, "completion": "b"}, "prompt is of type int; give a string or messages"),
        (CHAT, {"text": 7}, "text is of type int; give a string"),
        (CHAT, {"text": "\ud800"}, "lone surrogate"),
        (CHAT, {"messages": MESSAGES, "thinking": "yes"}, "thinking is of type str; give true or false"),
        (CHAT, {"messages": MESSAGES[:1]}, "hold no reply"),
        (CHAT, {"messages": "a"}, "messages is of type str"),
        (CHAT, {"messages": MESSAGES, "tools": [{}]}, "tool 1 is not of the form"),
        (RAW, {"messages": MESSAGES}, "holds messages, but prompts are raw; give 'prompt' and 'response'"),
        (RAW, {"prompt": MESSAGES[:1], "response": "x"}, "holds messages, but prompts are raw"),
        (RAW, {"prompt": "a", "response": "b", "thinking": True}, "which a raw prompt has no place"),
        (RecordReader(tokenizer=TOKENIZER), {"messages": MESSAGES}, "but there is no chat template"),
        (TOKENS, {"text": "a"}, "the record holds text, but there is no tokenizer"),
        (TOKENS, {"prompt": "a", "response": "x"}, "the record holds text, but there is no tokenizer"),
        (TOKENS, {"tokens": "abc", "responses": [[1, 2]]}, "tokens is not a list of whole numbers"),
        (TOKENS, {"tokens": [1, True], "responses": [[1, 2]]}, "tokens is not a list of whole numbers"),
        (TOKENS, {"tokens": [1, 2]}, "responses is not a list of pairs"),
        (TOKENS, {"tokens": [1, 2], "responses": [1, 2]}, "responses is not a list of pairs"),
        (TOKENS, {"tokens": [1, 2], "responses": [[1]]}, "responses is not a list of pairs"),
        (TOKENS, {"tokens": [1, 2], "responses": [[0, 2]]}, "a response spans tokens 0 to 2"),
        (TOKENS, {"tokens": [1, 2], "responses": []}, "has no response"),
        (TOKENS, {"tokens": [1, 2], "responses": [[1, 2]], "clipped": 1}, "clipped is of type int"),
        (TOKENS, {"tokens": [1, -2], "responses": [[1, 2]]}, "a token is -2; tokens are from 0 to 4294967"),
        (SMALL_VOCABULARY, {"tokens": [1, 9], "responses": [[1, 2]]}, "a token is 9; tokens are from 0 to 8"),
        (SMALL_VOCABULARY, TrainingExample((1, 9), (Span(1, 2),)), "Was the data made for another tokenizer"),
    ],
    ids=range(37),
)  # fmt: skip
def test_a_faulty_record_is_refused(reader: RecordReader, record: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        reader.read(record)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"prompt_format": "row"},
            "prompt_format is 'row'; it is one of auto, chat, raw; did you mean 'raw'",
        ),
        ({"prompt_format": "chat"}, "prompt_format is 'chat', but there is no chat template"),
        ({"max_length": 1}, "max_length is 1; an example needs at least 2 tokens"),
    ],
)
def test_a_reader_that_cannot_work_is_refused(options: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        RecordReader(**options)


@pytest.mark.parametrize(
    ("missing", "record", "problem"),
    [
        ("eos", {"text": "a"}, "the tokenizer has no <eos>"),
        ("bos", {"text": "a"}, "the tokenizer has no <bos>, so a text's first token would follow nothing"),
        ("bos", {"prompt": "", "response": "a"}, "after at least one token of prompt"),
    ],
)
def test_a_tokenizer_without_ends_is_refused(tmp_path: Path, missing: str, record: Any, problem: str) -> None:
    directory = edited_copy(tmp_path / "tokenizer")
    (directory / "tokenizer_config.json").write_text(f'{{"{missing}_token": "<absent>"}}')
    tokenizer = Tokenizer.from_directory(directory)
    # A name that no control has is no name; then the usual one counts.
    tokenizer.template_names = {f"{missing}_token": "<absent>"}
    with pytest.raises(InputError, match=problem):
        RecordReader(tokenizer=tokenizer).read(record)


def test_the_bundled_files_read_all_forms() -> None:
    tokenizer = Tokenizer.from_directory(DIRECTORY)
    (example,) = RecordReader(tokenizer=tokenizer).read({"text": "The sea"}).examples
    assert example.tokens == tuple(ids_of("<bos>The sea<eos>"))
