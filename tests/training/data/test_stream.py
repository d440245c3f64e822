"""The examples of a run depend on data, seed and presentation number, not on where one starts or stops."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.training.data.records import RecordReader, RecordReading, SkipReason, Span, TrainingExample
from dgemma.training.data.sources import open_source
from dgemma.training.data.stream import MAX_PROBLEMS, ExampleStream
from text.bundled import TOKENIZER
from text.released_style import LARGE

READER = RecordReader(max_length=8)


def record(number: int, *, prompt: int = 1, response: int = 2) -> dict[str, Any]:
    tokens = [number] * (prompt + response)
    return {"tokens": tokens, "responses": [[prompt, prompt + response]]}


class Again:
    """An iterable without a length, that can be read again."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records
        self.num_reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_reads += 1
        return iter(self.records)


class Remembering(RecordReader):
    """Reads each record once: a chat takes long, and thousands of draws show the same one."""

    def read(self, record: object) -> RecordReading:
        return _read_once(self, json.dumps(record))


@cache
def _read_once(reader: RecordReader, record: str) -> RecordReading:
    return RecordReader.read(reader, json.loads(record))


def stream(data: Any, reader: RecordReader = READER, **options: Any) -> ExampleStream:
    return ExampleStream(open_source(data, reader), **options)


def numbers(examples: list[TrainingExample]) -> list[int]:
    return [example.tokens[0] for example in examples]


# Some records are too long; they show nothing.
data_sets = st.lists(st.sampled_from([1, 1, 1, 9]), min_size=1, max_size=12).map(
    lambda prompts: [record(number, prompt=prompt) for number, prompt in enumerate([1, *prompts])]
)


@settings(deadline=None)
@given(data_sets, st.booleans(), st.booleans(), st.integers(0, 9), st.data())
def test_pieces_of_a_run_join_to_the_run(
    records: list[Any], is_stream: bool, shuffle: bool, seed: int, data: st.DataObject
) -> None:
    options = {"seed": seed, "shuffle": shuffle, "buffer_len": 3}

    def opened() -> ExampleStream:
        return stream(Again(records) if is_stream else records, **options)

    whole = opened().take(0, 40)
    borders = sorted(data.draw(st.lists(st.integers(0, 40), max_size=5)))
    borders = [0, *borders, 40]
    one = opened()
    pieces = [one.take(a, b - a) for a, b in pairwise(borders)]
    assert [example for piece in pieces for example in piece] == whole
    # Resumed in another process, and read back and forth in the same one.
    start = data.draw(st.integers(0, 40))
    assert opened().take(start, 40 - start) == whole[start:]
    assert one.take(start, 40 - start) == whole[start:]
    assert one.take(0, start) == whole[:start]


@pytest.mark.parametrize("make", [list, Again], ids=["sequence", "stream"])
def test_every_epoch_shows_every_record_once(make: Any) -> None:
    records = [record(number) for number in range(20)]
    shown = stream(make(records), seed=4, buffer_len=8)
    epochs = [numbers(shown.take(epoch * 20, 20)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert numbers(stream(make(records), seed=5, buffer_len=8).take(0, 20)) != epochs[0]


@pytest.mark.parametrize("make", [list, Again], ids=["sequence", "stream"])
def test_without_shuffling_records_come_in_order(make: Any) -> None:
    shown = stream(make([record(number) for number in range(4)]), shuffle=False)
    assert numbers(shown.take(0, 9)) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert shown.num_records == (4 if make is list else None)


def test_a_record_that_shows_nothing_is_replaced_and_counted() -> None:
    """And not always by its neighbour: here the last half of the file is too long."""
    records = [record(number, prompt=9 if number >= 50 else 1) for number in range(100)]
    shown = stream(records, seed=1)
    found = Counter(numbers(shown.take(0, 100)))
    assert set(found) == set(range(50))  # each of the good ones, once by its own right
    assert max(found.values()) < 8
    assert shown.skipped == {SkipReason.PROMPT_TOO_LONG: 50}
    shown.take(0, 100)
    assert shown.skipped == {SkipReason.PROMPT_TOO_LONG: 50}  # not counted twice
    assert numbers(stream(records, seed=1).take(70, 30)) == numbers(shown.take(70, 30))


def test_a_stream_leaves_out_what_shows_nothing() -> None:
    records = [record(number, prompt=9 if number % 2 else 1) for number in range(6)]
    shown = stream(Again(records), shuffle=False)
    assert numbers(shown.take(0, 5)) == [0, 2, 4, 0, 2]
    assert shown.skipped == {SkipReason.PROMPT_TOO_LONG: 3}


def test_one_of_several_replies_is_chosen_by_its_length() -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x" * 10},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "y " * 90},
    ]
    reader = Remembering(tokenizer=TOKENIZER, template=LARGE)
    examples = reader.read({"messages": chat}).examples
    short, long = (example.responses[0].stop - example.responses[0].start for example in examples)
    choices = stream([{"messages": chat}], reader, seed=2).take(0, 2000)
    assert choices[:99] != stream([{"messages": chat}], reader, seed=3).take(0, 99)
    found = Counter(choices)
    assert set(found) == set(examples)
    share = found[examples[0]] / 2000
    expected = short / (short + long)
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 2000) ** 0.5


def test_text_windows_move_from_epoch_to_epoch(tmp_path: Path) -> None:
    text = " ".join(str(number) for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    shown = stream(tmp_path, RecordReader(tokenizer=TOKENIZER, max_length=20), seed=3)
    assert shown.num_records is not None
    epochs = []
    for epoch in range(4):
        examples = shown.take(epoch * shown.num_records, shown.num_records)
        assert sum(len(example.tokens) - 1 for example in examples) == len(TOKENIZER.encode(text)) + 1
        epochs.append(frozenset(example.tokens for example in examples))
    assert len(set(epochs)) > 1


def test_a_fault_is_told_when_its_record_is_needed() -> None:
    shown = stream([record(0), {"tokens": 7}, record(2)], shuffle=False)
    assert numbers(shown.take(0, 1)) == [0]
    with pytest.raises(InputError, match="record 1: tokens is not a list"):
        shown.take(1, 1)
    assert numbers(shown.take(2, 1)) == [2]


def test_a_fault_in_a_stream_stays_a_fault() -> None:
    records = [record(0), {"tokens": 7}]
    for data in (Again(records), iter(records)):
        shown = stream(data, shuffle=False)
        for _ in range(3):
            with pytest.raises(InputError, match="record 1: tokens is not a list"):
                shown.take(0, 2)


def test_an_error_of_the_iterables_own_stays_its_own() -> None:
    def broken() -> Iterator[Any]:
        yield record(0)
        raise OSError("the disk is gone")

    shown = stream(broken(), shuffle=False)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            shown.take(0, 2)


def test_an_iterator_comes_once() -> None:
    shown = stream(iter([record(number) for number in range(5)]), shuffle=False)
    assert numbers(shown.take(1, 2)) == [1, 2]
    with pytest.raises(InputError, match="presentation 1 was read already, up to 3, and data is an iterator"):
        shown.take(1, 1)
    assert numbers(shown.take(3, 1)) == [3]
    with pytest.raises(InputError, match="checking would leave nothing to train on"):
        shown.check_all(canvas_len=4)
    with pytest.raises(InputError, match="data ended after 5 presentations, and it is an iterator"):
        shown.take(4, 2)


def test_going_on_reads_a_stream_once() -> None:
    data = Again([record(number) for number in range(10)])
    shown = stream(data, buffer_len=4)
    for start in range(0, 10, 2):
        shown.take(start, 2)
    assert data.num_reads == 1 + 1  # one to see whether it is an iterator


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([record(0, prompt=9)] * 3, "none of the 3 records gives an example: the prompt alone reaches"),
        (Again([record(0, prompt=9)]), "no record of the stream gives an example"),
        (Again([]), "no record of the stream gives an example"),
    ],
)
def test_data_that_shows_nothing_at_all_is_refused(data: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        stream(data).take(0, 1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"seed": -1}, "seed is -1"), ({"buffer_len": 0}, "buffer_len is 0; a shuffle buffer holds at least")],
)
def test_impossible_options_are_refused(options: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        stream([record(0)], **options)


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1)])
def test_presentations_are_counted_from_zero(start: int, count: int) -> None:
    with pytest.raises(InputError, match=r"take\(-?[01], -?1\): presentations and their number"):
        stream([record(0)]).take(start, count)


# Checking ahead

MIXED = [
    TrainingExample((1,) * 4, (Span(1, 3), Span(3, 4))),
    record(2, prompt=3, response=4),
    record(3, prompt=3, response=9),
    {"tokens": 7},
    record(4, prompt=8),
]


@pytest.mark.parametrize("make", [list, Again], ids=["sequence", "stream"])
def test_a_check_counts_everything_and_collects_faults(make: Any) -> None:
    shown = stream(make(MIXED))
    seen: list[tuple[int, int | None]] = []
    report = shown.check_all(canvas_len=2, progress=lambda done, total: seen.append((done, total)))
    assert report.num_records == 5
    assert report.num_examples == 3
    assert report.num_tokens == 4 + 7 + 8
    assert report.num_response_tokens == 3 + 4 + 5
    assert report.longest == 8
    assert report.num_clipped == 1
    assert report.skipped == {SkipReason.PROMPT_TOO_LONG: 1}
    assert report.num_broken == 1
    assert report.problems == (
        "record 3: tokens is not a list of whole numbers; give the ids of the record's tokens.",
    )
    assert report.canvases == {1: 2, 2: 1, 3: 1}
    assert seen == [(5, 5)]


def test_a_check_of_many_faults_tells_the_first(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{}\n" * 150)
    seen: list[tuple[int, int | None]] = []
    report = stream(tmp_path / "d.jsonl").check_all(
        canvas_len=4, progress=lambda done, total: seen.append((done, total))
    )
    assert report.num_broken == 150
    assert len(report.problems) == MAX_PROBLEMS
    assert f"{tmp_path / 'd.jsonl'}:2: " in report.problems[1]
    assert seen == [(64, 150), (128, 150), (150, 150)]


def test_a_check_needs_a_canvas() -> None:
    with pytest.raises(InputError, match="canvas_len is 0; a canvas needs at least one token"):
        stream([record(0)]).check_all(canvas_len=0)
