"""Our event files, read by the real TensorBoard."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from dgemma.errors import CheckpointError
from dgemma.training.event_file import EventFile, _checksum, _varint

Curve = list[tuple[float, int, float]]  # wall time, step, value


def as_float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def curves(directory: Path) -> dict[str, Curve]:
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return {
        tag: [(point.wall_time, point.step, point.value) for point in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def steps(directory: Path, tag: str = "loss") -> list[int]:
    return [step for _, step, _ in curves(directory)[tag]]


def write_steps(directory: Path, first: int, last: int, value: float = 1.0, start_step: int = 0) -> Path:
    with EventFile(directory, start_step=start_step) as file:
        for step in range(first, last + 1):
            file.scalars(step, {"loss": value})
    return file.path


def test_thousands_of_steps_are_read_back_exactly(tmp_path: Path) -> None:
    rng = random.Random(0)
    tags = ["loss/total", "loss/diffusion", "optimizer/learning_rate"]
    expected: dict[str, Curve] = {tag: [] for tag in tags}
    with EventFile(tmp_path) as file:
        for step in range(1, 5001):
            wall_time = 1.7e9 + step / 7
            values = {tag: rng.lognormvariate(0, 20) for tag in tags}
            file.scalars(step, values, wall_time=wall_time)
            for tag, value in values.items():
                expected[tag].append((wall_time, step, as_float32(value)))
    assert curves(tmp_path) == expected


def test_special_numbers_are_themselves(tmp_path: Path) -> None:
    values = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e39, -1e308, 1e-45, 1e-300, 3.4028234e38, -1.5]
    with EventFile(tmp_path) as file:
        for step, value in enumerate(values):
            file.scalars(step, {"x": value})
    found = [value for _, _, value in curves(tmp_path)["x"]]
    assert list(map(repr, found)) == [repr(as_float32(value)) for value in values]


def test_any_tag_and_any_step_are_kept(tmp_path: Path) -> None:
    tags = ["loss/日本語", "Verlust/größe", "🎉", "a b <&> \"'", "x" * 1000, "half a pair \ud800"]
    big = [0, 1, 127, 128, 16383, 16384, 2**31, 2**53, 2**63 - 1]
    with EventFile(tmp_path) as file:
        for step in big:
            file.scalars(step, dict.fromkeys(tags, 1.0))
    found = curves(tmp_path)
    assert set(found) == {*tags[:-1], "half a pair ?"}
    assert all([step for _, step, _ in curve] == big for curve in found.values())


def test_nothing_to_say_is_no_event(tmp_path: Path) -> None:
    with EventFile(tmp_path) as file:
        size = file.path.stat().st_size
        file.scalars(1, {})
    assert file.path.stat().st_size == size


def test_tensorboard_finds_the_file_and_its_version(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 1, 1)
    prefix, seconds, host = path.name[:20], *path.name[20:].split(".", 1)
    assert prefix == "events.out.tfevents."
    assert len(seconds) == 10
    assert seconds.isdecimal()
    assert host
    version, start, _ = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (0, SessionLog.START)


def test_a_resumed_run_replaces_the_steps_it_runs_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 9, value=1.0)
    write_steps(tmp_path, 7, 12, value=2.0, start_step=6)
    assert [(step, value) for _, step, value in curves(tmp_path)["loss"]] == [
        *((step, 1.0) for step in range(7)),
        *((step, 2.0) for step in range(7, 13)),
    ]


def test_steps_lost_in_a_crash_are_gone_even_before_they_are_run_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 9)
    write_steps(tmp_path, 1, 0, start_step=6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    write_steps(tmp_path, 0, 2, start_step=0)
    assert steps(tmp_path) == [0, 1, 2]


def test_many_resumes_in_one_second_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start, now in enumerate([1000.0, 1000.2, 1000.1, 900.0, 1002.0, 5.0]):
        monkeypatch.setattr("time.time", lambda now=now: now)
        monkeypatch.setattr("socket.gethostname", lambda start=start: "zyxwvu"[start])
        write_steps(tmp_path, 2 * start + 1, 2 * start + 5, value=start, start_step=2 * start)
    (tmp_path / "events.out.tfevents.odd").touch()
    write_steps(tmp_path, 13, 13, start_step=12)
    assert [value for _, _, value in curves(tmp_path)["loss"]] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 1]


def test_a_crash_in_the_middle_of_a_record_hurts_no_later_file(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 1, 9)
    path.write_bytes(path.read_bytes()[:-5])
    write_steps(tmp_path, 7, 8, value=2.0, start_step=6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_flush_makes_all_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventFile(tmp_path) as file:
        file.scalars(1, {"loss": 1.0})
        file.flush()
        assert steps(tmp_path) == [1]
        monkeypatch.setattr("dgemma.training.event_file._SECONDS_BETWEEN_FLUSHES", 0.0)
        file.scalars(2, {"loss": 1.0})
        assert steps(tmp_path) == [1, 2]


def test_checksums_and_varints_are_those_of_the_formats() -> None:
    rng = random.Random(0)
    for length in [0, 1, 8, 100]:
        data = rng.randbytes(length)
        assert _checksum(data) == struct.pack("<I", masked_crc32c(data))
    for value in [0, 127, 128, 300, 2**63 - 1, -1]:
        assert Event.FromString(b"\x10" + _varint(value)).step == value


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        EventFile(tmp_path / "file")


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file._file.close()
    file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(CheckpointError, match=r"No space left .* Make room"):
        file.scalars(1, {"loss": 1.0})
    file._file.close()
    file._file = open("/dev/full", "wb")  # noqa: SIM115
    file.scalars(1, {"loss": 1.0})
    with pytest.raises(CheckpointError, match="No space left"):
        file.flush()
    with pytest.raises(CheckpointError, match="No space left"):
        file.close()
