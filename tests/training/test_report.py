"""Reports and their log: what was said is read back, and a crash costs at most half a line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgemma.durable_files import LineFile
from dgemma.errors import CheckpointError, InputError
from dgemma.training.report import (
    LOG_NAME,
    NOISE_BINS,
    NOISE_LABELS,
    HeldOutReport,
    RunLog,
    StepReport,
    TrainingReport,
    duration,
    noise_bin,
    read_log,
)
from sizes import cases

STEP = StepReport(
    step=1, num_steps=10, loss=3.2, diffusion=2.1, encoder=1.1,
    diffusion_by_noise=(0.4, None, 1.9, 2.8, 1 / 3), learning_rate=1.5e-4, grad_norm=0.8, examples=4,
    tokens=4096, seconds=0.7, tokens_per_second=812.5, eta_s=None,
)  # fmt: skip
HELD_OUT = HeldOutReport(
    step=0, diffusion=2.5, encoder=1.4, diffusion_by_noise=(None,) * NOISE_BINS, examples=64, seconds=3.0
)


def a_run(num_steps: int) -> list[TrainingReport]:
    """Held-out before the first step, and after every other one."""
    reports: list[TrainingReport] = [HELD_OUT]
    for step in range(1, num_steps + 1):
        reports.append(replace(STEP, step=step, loss=1 / step))
        if step % 2 == 0:
            reports.append(replace(HELD_OUT, step=step))
    return reports


def write(run_dir: Path, reports: list[TrainingReport], start_step: int = 0) -> Path:
    with RunLog(run_dir, start_step=start_step) as log:
        for report in reports:
            log.write(report)
    return log.path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    reports = a_run(7)
    assert read_log(write(tmp_path / "new" / "run", reports)) == reports


def test_each_line_is_on_the_disk_at_once(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for number, report in enumerate(a_run(3), start=1):
            log.write(report)
            assert len(read_log(log.path)) == number


def test_numbers_that_are_not_finite_survive_in_strict_json(tmp_path: Path) -> None:
    worst = replace(
        STEP, loss=math.nan, diffusion=math.inf, encoder=-math.inf,
        diffusion_by_noise=(math.nan, math.inf, None, 0.0, -0.0),
    )  # fmt: skip
    path = write(tmp_path, [worst])

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (back,) = read_log(path)
    assert repr(back) == repr(worst)


def test_a_resumed_run_says_its_steps_once(tmp_path: Path) -> None:
    write(tmp_path, a_run(9))
    rest = [r for r in a_run(12) if r.step > 6]
    assert read_log(write(tmp_path, rest, start_step=6)) == a_run(12)
    assert [file.name for file in tmp_path.iterdir()] == [LOG_NAME]


def test_a_run_from_the_beginning_forgets_all(tmp_path: Path) -> None:
    write(tmp_path, a_run(9))
    assert read_log(write(tmp_path, a_run(2))) == a_run(2)


@pytest.mark.parametrize("start_step", [6, 7, 8, 9])
def test_a_crash_in_any_byte_of_the_last_line_costs_that_line_only(tmp_path: Path, start_step: int) -> None:
    whole = write(tmp_path / "whole", a_run(9)).read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path = tmp_path / LOG_NAME
    for end in {*range(last, len(whole), cases(1, 4)), len(whole) - 1}:
        path.write_bytes(whole[:end])
        # When only the newline is missing, nothing is lost.
        known = a_run(9) if end == len(whole) - 1 else a_run(8)
        assert read_log(path) == known
        rest = [r for r in a_run(9) if r.step > start_step]
        kept = [r for r in known if r.step <= start_step]
        assert read_log(write(tmp_path, rest, start_step)) == [*kept, *rest]


def test_blocks_lost_with_the_power_count_as_half_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, a_run(3))
    path.write_bytes(path.read_bytes() + b"\0" * 4000)
    assert read_log(path) == a_run(3)
    assert read_log(write(tmp_path, [], start_step=3)) == a_run(3)


def test_a_crash_while_resuming_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, a_run(9))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        with pytest.raises(KeyboardInterrupt):
            RunLog(tmp_path, start_step=4)
    assert read_log(path) == a_run(9)
    assert read_log(write(tmp_path, [], start_step=4)) == a_run(4)


def changed(**changes: Any) -> bytes:
    return json.dumps({**STEP.to_json(), **changes}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"no json", b'{"kind": "step"', b"\xff\xfe", b"[1]", b"7", b"{}", b'{"kind": "step"}',
        changed(kind="epoch"), changed(step=1.5), changed(step=True), changed(loss="much"),
        changed(loss=None), changed(loss=True), changed(loss=10**400), changed(diffusion_by_noise=[1.0]),
        changed(diffusion_by_noise=3), changed(eta_s="soon"),
    ],
)  # fmt: skip
def test_any_other_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, a_run(3))
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(b"\n".join([first, line, rest]))
    with pytest.raises(CheckpointError, match=r"log\.jsonl, line 2, .*remove that line"):
        read_log(path)
    with pytest.raises(CheckpointError, match="line 2"):
        RunLog(tmp_path, start_step=3)


def test_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / LOG_NAME
    path.write_bytes(changed(colour="blue") + b"\n")
    assert read_log(path) == [STEP]


def test_a_missing_log_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"log\.jsonl cannot be read: No such file"):
        read_log(tmp_path / LOG_NAME)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        RunLog(tmp_path / "file")
    with RunLog(tmp_path) as log:
        log._file.close()
        log._file = LineFile(Path("/dev/full"))
        with pytest.raises(CheckpointError, match=r"cannot be written: No space left .* Free some space"):
            log.write(STEP)


def test_a_log_that_cannot_be_forced_to_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with RunLog(tmp_path) as log:
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(CheckpointError, match=r"cannot be written: No space left .* Free some space"):
            log.sync()


def test_blocks_lost_in_the_middle_end_the_log_there(tmp_path: Path) -> None:
    path = write(tmp_path, a_run(3))
    path.write_bytes(path.read_bytes() + b'{"kind": "st' + bytes(500) + b"0}\n" + changed(step=9) + b"\n")
    assert read_log(path) == a_run(3)


def test_bins_are_equal_and_cover_all_noise() -> None:
    assert [noise_bin(t) for t in (0.0, 0.1999, 0.2, 0.4, 0.6, 0.8, 0.9999, 1.0)] == [0, 0, 1, 2, 3, 4, 4, 4]
    assert NOISE_LABELS == ("0.0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1.0")


@pytest.mark.parametrize("t", [-0.1, 1.1, math.nan])
def test_noise_outside_of_0_to_1_is_refused(t: float) -> None:
    with pytest.raises(InputError, match="from 0 to 1"):
        noise_bin(t)


@pytest.mark.parametrize("report", [STEP, HELD_OUT])
def test_a_report_has_all_bins(report: TrainingReport) -> None:
    with pytest.raises(InputError, match="has 3 values; it must have 5"):
        replace(report, diffusion_by_noise=(1.0, 2.0, None))


def test_scalars_leave_out_bins_without_examples() -> None:
    assert STEP.scalars() == {
        "loss/total": 3.2, "loss/diffusion": 2.1, "loss/encoder": 1.1, "diffusion_by_noise/0.0-0.2": 0.4,
        "diffusion_by_noise/0.4-0.6": 1.9, "diffusion_by_noise/0.6-0.8": 2.8,
        "diffusion_by_noise/0.8-1.0": 1 / 3,
        "optimizer/learning_rate": 1.5e-4, "optimizer/grad_norm": 0.8, "speed/tokens_per_second": 812.5,
    }  # fmt: skip
    assert HELD_OUT.scalars() == {"held_out/diffusion": 2.5, "held_out/encoder": 1.4}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (-3, "0s"), (59.4, "59s"), (59.6, "1m"), (719, "11m"), (3600, "1h00m"), (11520, "3h12m"),
        (86400, "1d0h"), (183600, "2d3h"), (math.nan, "-"), (math.inf, "-"),
    ],
)  # fmt: skip
def test_a_duration_is_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
