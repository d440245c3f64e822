"""Trace files: small, the same when read again, and refused by name when they are wrong."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from dgemma import InputError, LanguageModel
from dgemma.trace import trace_reader
from dgemma.trace.trace import Trace
from dgemma.trace.trace_reader import read_trace, trace_of_bytes
from dgemma.trace.trace_writer import trace_bytes
from recorded_calls import recorded

HEAD = b'{"format":"dgemma-trace","version":1,"about":{}}\n'
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def trace(lm: LanguageModel) -> Trace:
    with lm.record("test") as recorder:
        lm.generate("The sea is", max_tokens=40, seed=5, logprobs=2, pins={3: 17, 5: [1, 2]})
        lm.generate("The sea is", max_tokens=20, seed=5, regex="[a-c]{2,9}")
        lm.generate("The sea is", max_tokens=6, seed=5, decode="verified")
    return recorder.trace()


@pytest.fixture(scope="module")
def lines(trace: Trace) -> Lines:
    return [json.loads(line) for line in gzip.decompress(trace_bytes(trace)).splitlines()]


def packed(lines: Lines) -> bytes:
    return gzip.compress("\n".join(map(json.dumps, lines)).encode())


def outcome(content: bytes) -> Trace | str:
    """The trace, or why it is refused."""
    try:
        return trace_of_bytes(content)
    except InputError as error:
        return str(error)


def copied(lines: Lines) -> Lines:
    found: Lines = json.loads(json.dumps(lines))
    return found


def test_a_trace_is_read_as_it_was_written(trace: Trace) -> None:
    assert trace_of_bytes(trace_bytes(trace)) == trace


def test_a_plain_file_is_read_too(trace: Trace) -> None:
    assert trace_of_bytes(gzip.decompress(trace_bytes(trace))) == trace


def test_the_same_trace_gives_the_same_bytes(trace: Trace) -> None:
    assert trace_bytes(trace) == trace_bytes(trace_of_bytes(trace_bytes(trace)))


def test_noise_is_not_recorded(lm: LanguageModel) -> None:
    """It would be most of the file, and is known from the seed."""
    with lm.record() as recorder:
        lm.generate("The sea is", max_tokens=lm.config.canvas_len, seed=5, max_denoising_steps=8)
    trace = recorder.trace()
    assert len(trace_bytes(trace)) < 300 * trace.num_steps + 3000


def test_two_hundred_truncated_files_are_refused(trace: Trace) -> None:
    content = trace_bytes(trace)
    for cut in range(200):
        with pytest.raises(InputError, match="the trace"):
            trace_of_bytes(content[: len(content) * cut // 200])


def test_three_hundred_files_with_a_flipped_bit_are_refused(trace: Trace) -> None:
    """All but the bits that fill up the last byte of the compressed stream: they say nothing."""
    content, rng = trace_bytes(trace), random.Random(0)
    first = 10  # after gzip's header, of which some bytes mean nothing
    accepted = 0
    for bit in rng.sample(range(8 * first, 8 * len(content)), 300):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        found = outcome(bytes(changed))
        if isinstance(found, Trace):
            accepted += 1
            assert found == trace
        else:
            assert found.startswith("the trace")
    assert accepted <= 7


@pytest.mark.parametrize("number", range(40))
def test_a_missing_line_is_seen_or_was_not_needed(lines: Lines, trace: Trace, number: int) -> None:
    changed = copied(lines)
    del changed[number * len(lines) // 40]
    found = outcome(packed(changed))
    assert found != trace
    assert isinstance(found, Trace) or found.startswith("the trace")


WRONG: list[Any] = [
    None, True, -1, 1.5, 1e400, "x", "", [], {}, [[]], [None], [-1], ["a"], [1, 2, 3], {"a": 1}, 1 << 70,
    [1 << 40], "f" * 5000, [[1, 2], [3]], [[0, "x"]],
]  # fmt: skip
FIELDS = [
    ("request", "round"), ("request", "seed"), ("request", "prompt"), ("request", "params"),
    ("request", "pinned"), ("request", "constraint"), ("step", "canvas"), ("step", "step"),
    ("step", "at_ms"), ("step", "argmax"), ("step", "entropy"), ("step", "accepted"), ("step", "changed"),
    ("step", "drawn"), ("step", "logprobs"), ("commit", "tokens"), ("commit", "steps"),
    ("commit", "accepted"), ("answer", "text"), ("answer", "tokens"), ("answer", "seconds"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), FIELDS)
@pytest.mark.parametrize("wrong", range(len(WRONG)))
def test_a_wrong_field_is_named_or_means_something(
    lines: Lines, trace: Trace, kind: str, name: str, wrong: int
) -> None:
    changed = copied(lines)
    line = next((line for line in changed if kind in line and name in line[kind]), None)
    if line is None:
        line = next(line for line in changed if kind in line)
    line[kind][name] = WRONG[wrong]
    found = outcome(packed(changed))
    if isinstance(found, Trace):
        assert trace_of_bytes(trace_bytes(found)) == found, "what is taken can be written again"
    else:
        assert found.startswith("the trace, line ")
        assert len(found) < 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a trace"),
        (b"hello", "not JSON"),
        (b"\x1f\x8bhello", "not a whole trace file"),
        (gzip.compress(b""), "not a trace"),
        (gzip.compress(b"{}"), "not a trace"),
        (gzip.compress(b"[]"), "not a trace"),
        (gzip.compress(b"\xff\xfe"), "not JSON"),
        (gzip.compress(b'{"format":"dgemma-trace","version":2,"about":{}}'), "version 2"),
        (gzip.compress(b'{"format":"dgemma-trace","version":1}'), "about is not an object"),
        (gzip.compress(HEAD), "ends before its last line"),
        (gzip.compress(b'{"format":' + b"[" * 100_000), "not JSON"),
        (gzip.compress(b'{"format":NaN}'), "NaN is no number"),
        (
            gzip.compress(HEAD + b'{"step":{"request":0}}'),
            "there are 0 so far",
        ),
        (gzip.compress(HEAD + b'{"texts":{"x":"y"}}'), "texts"),
        (gzip.compress(HEAD + b"7"), "line 2"),
        (gzip.compress(HEAD + b'{"what":{}}'), "'what'"),
    ],
    ids=map(str, range(16)),  # bytes of gzip hold the time
)
def test_what_is_no_trace_is_refused_by_name(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        trace_of_bytes(content)


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(b"0" * (trace_reader.MAX_LINE_BYTES + 2), compresslevel=9)
    assert len(bomb) < 100_000
    with pytest.raises(InputError, match="larger than any trace"):
        trace_of_bytes(bomb)
    monkeypatch.setattr(trace_reader, "MAX_BYTES", 1000)
    request = b'{"texts":{"1":"a"}}\n'
    with pytest.raises(InputError, match="larger than any trace"):
        trace_of_bytes(gzip.compress(HEAD + 1000 * request))


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_small_file_of_many_steps_is_refused_before_it_fills_memory(
    logprobs: bool, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written as changes, a step that changes nothing takes no bytes, and as much memory as any."""
    first = next(i for i, line in enumerate(lines) if "step" in line)
    left_out = ("argmax", "drawn", "logprobs")
    step = {name: value for name, value in lines[first]["step"].items() if name not in left_out}
    step["changed"] = []
    length = len(step["entropy"])
    if logprobs:
        step["logprobs"] = [[[0, 0]]] * length
    many = packed([*lines[: first + 1], *[{"step": step}] * 1000])
    assert len(many) < 20_000
    # Each step costs its argmax and its entropies; with log-probabilities their lists, and four for a pair.
    most = 100 * length * (7 if logprobs else 2)
    monkeypatch.setattr(trace_reader, "MAX_NUMBERS", most)
    with pytest.raises(InputError, match=f"holds more than {most:,} numbers") as caught:
        trace_of_bytes(many)
    line = int(str(caught.value).split("line ")[1].split(":")[0])
    assert first + 90 < line <= first + 110


def test_a_file_that_is_not_there_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none.trace")
    with pytest.raises(InputError, match="directory"):
        read_trace(tmp_path)
    monkeypatch.setattr(trace_reader, "MAX_FILE_BYTES", 10)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(InputError, match="larger than"):
        read_trace(tmp_path / "large")


def test_every_kind_of_call_can_be_written_and_read(lm: LanguageModel) -> None:
    for seed in range(1000, 1020):
        trace = recorded(lm, seed)
        assert trace_of_bytes(trace_bytes(trace)) == trace
