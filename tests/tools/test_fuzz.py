"""The fuzzer notices what must not come out, and keeps its smallest input; its targets take good inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dgemma.errors import InputError
from tools.fuzz import Watched, minimized, place_of, words
from tools.fuzz_targets import TARGETS, Target


def watched(path: Path, run: Callable[[bytes], object], seconds: float = 5.0) -> Watched:
    return Watched(Target(run=run, seeds=[], seconds=seconds), path)


def fails_on_b(data: bytes) -> None:
    if b"a" in data:
        raise InputError("meant")
    if b"b" in data:
        raise KeyError("not meant")


def test_only_what_is_not_meant_is_a_finding_and_its_smallest_input_is_kept(tmp_path: Path) -> None:
    run = watched(tmp_path, fails_on_b)
    for data in (b"fine", b"abc", b"xxxbxxx", b"xb", b"xxb"):
        run(data)
    (finding,) = tmp_path.iterdir()
    assert (finding / "input").read_bytes() == b"xb"
    assert "KeyError at test_fuzz.py" in (finding / "traceback.txt").read_text()
    assert run.executions == 5


def test_an_input_that_takes_too_much_processor_time_is_a_finding(tmp_path: Path) -> None:
    def spin(data: bytes) -> None:
        ends = time.process_time() + 20
        while time.process_time() < ends:
            try:
                list(range(1000))
            except Exception:  # noqa: S112 as code under test may
                continue

    error = watched(tmp_path, spin, seconds=0.1).outcome(b"")
    assert error is not None
    assert place_of(error).startswith("SlowError")


def test_a_finding_is_reduced_to_the_bytes_it_needs() -> None:
    data = b"x" * 500 + b"b" + b"y" * 300 + b"c" + b"z" * 100
    assert minimized(data, lambda shorter: b"b" in shorter and b"c" in shorter) == b"bc"


def test_the_dictionary_escapes_every_byte() -> None:
    assert r'"\x61\x62\x63"' in words([b'{"abc": "\xff"}']).splitlines()


@pytest.mark.parametrize("name", TARGETS)
def test_the_good_inputs_of_a_target_are_no_findings(name: str, tmp_path: Path) -> None:
    """The fuzzer begins with them: a target that refused them all would test one refusal."""
    target = TARGETS[name](tmp_path)
    seeds = list(target.seeds)
    first = target.run(seeds[0])
    assert name != "http" or b"200 OK" in first
    run = Watched(target, tmp_path / "findings")
    assert [error for seed in seeds[:6] if (error := run.outcome(seed)) is not None] == []
    assert max(map(len, seeds)) <= target.max_bytes
