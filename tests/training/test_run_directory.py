"""A state is whole or not there, whenever the process ends; one run at a time writes into a directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.errors import CheckpointError, InputError
from dgemma.training.run_directory import RunDirectory, differences


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "master.a": torch.randn(3, 4, generator=generator),
        "narrow": torch.randn(2, 3, 5, generator=generator).to(torch.bfloat16),
        "half": torch.randn(7, generator=generator).to(torch.float16),
        "step.a": torch.tensor(float(seed)),
        "turned": torch.randn(4, 3, generator=generator).T,
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]),
    }


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
        if a[n].ndim
    )


def save(directory: RunDirectory, *steps: int, keep: int = 2) -> None:
    for step in steps:
        directory.save_state(step, {"step": step, "text": "Ünïcode"}, tensors(step), keep)


def check_whole(directory: RunDirectory, step: int) -> None:
    facts, found = directory.check_state(step), directory.load_state(step)
    assert facts == {"step": step, "text": "Ünïcode"}
    assert same_bits(found, tensors(step))
    assert found["step.a"] == step


def test_a_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "first")  # made on the way
    save(directory, 7)
    check_whole(directory, 7)


def test_the_states_are_listed_in_order_of_their_steps(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.states() == []
    save(directory, 900, 1000, 123_456_789, keep=9)  # more digits than the name is padded to
    save(directory, 5, keep=9)
    assert directory.states() == [5, 900, 1000, 123_456_789]
    check_whole(directory, 123_456_789)


def test_only_the_newest_states_are_kept(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for keep in (2, 1, 3):
        save(directory, *range(keep * 10, keep * 10 + 5), keep=keep)
        assert directory.states() == list(range(keep * 10 + 5 - keep, keep * 10 + 5))
        shutil.rmtree(tmp_path / "states")


def test_a_state_saved_again_is_the_new_one(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.save_state(3, {"old": True}, {"x": torch.zeros(2)}, keep=2)
    save(directory, 3)
    check_whole(directory, 3)


def test_what_is_not_a_state_is_not_listed(tmp_path: Path) -> None:
    """A partial state holds everything but its name in the moment before it gets it."""
    directory = RunDirectory(tmp_path)
    save(directory, 4)
    shutil.copytree(tmp_path / "states" / "step-00000004", tmp_path / "states" / "step-00000005.partial")
    shutil.copytree(tmp_path / "states" / "step-00000004", tmp_path / "states" / "step-best")
    (tmp_path / "states" / "step-00000006").mkdir()
    assert directory.states() == [4]


# Every file system call of `save_state` is where a process may end. An audit hook stops at the n-th of them,
# as a kill would: nothing after it happens, not even an `except OSError`. In a process of its own, because a
# hook cannot be taken out again.
CRASHES = """
import json, shutil, sys
from pathlib import Path
import torch
from dgemma.training.run_directory import RunDirectory

class Killed(BaseException):
    pass

left = None
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

def hook(event, args):
    global left
    if left is not None and event in CALLS:
        if left == 0:
            raise Killed(event)
        left -= 1

sys.addaudithook(hook)
# A crash in the middle of writing: some bytes of the file, then nothing.
tensors = lambda step: {"a": torch.full((1000,), float(step)), "b": torch.tensor(float(step))}

def whole(directory, step):
    facts, found = directory.check_state(step), directory.load_state(step)
    assert facts == {"step": step}, facts
    assert all(torch.equal(found[k], v) for k, v in tensors(step).items())

results = []
for number in range(1000):
    path = Path(sys.argv[1]) / str(number)
    directory = RunDirectory(path)
    for step in (1, 2):
        directory.save_state(step, {"step": step}, tensors(step), 2)
    left = number
    try:
        directory.save_state(3, {"step": 3}, tensors(3), 2)
        killed = None
    except Killed as error:
        killed = str(error)
    left = None
    try:
        newest = directory.states()[-1]
        whole(directory, newest)
        directory.save_state(newest + 1, {"step": newest + 1}, tensors(newest + 1), 2)
        whole(directory, directory.states()[-1])
        assert directory.states() == [newest, newest + 1], directory.states()
        assert len(list((path / "states").iterdir())) <= 3
        fault = None
    except Exception as error:
        fault = repr(error)
    results.append((killed, newest if fault is None else None, fault))
    shutil.rmtree(path)
    if killed is None:
        break
print(json.dumps(results))
"""


def test_a_process_may_end_at_any_point_of_a_save(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", CRASHES, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout)
    assert [fault for _, _, fault in results if fault] == []
    newest = [step for _, step, _ in results]
    assert newest == sorted(newest)  # the old one, then, from one moment on, the new one
    assert set(newest) == {2, 3}
    assert {killed for killed, _, _ in results} >= {"open", "os.rename", "os.mkdir", "os.remove", None}


def spoil(directory: RunDirectory, step: int, how: str) -> None:
    state = directory.path / "states" / f"step-{step:08d}"
    file = state / ("state.json" if how == "cut facts" else "state.safetensors")
    content = file.read_bytes()
    tail = len(content) // 3
    file.write_bytes(
        {
            "zeroed": bytes(len(content)),
            "zeroed numbers": content[:-tail] + bytes(tail),
            "cut": content[:-1],
            "cut facts": content[:-tail],
        }[how]
    )


DAMAGES = ("zeroed", "zeroed numbers", "cut", "cut facts")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_state_is_not_taken_and_the_older_one_is(how: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    save(directory, 4, 8)
    spoil(directory, 8, how)
    with pytest.raises(CheckpointError, match="step-00000008"):
        directory.check_state(8)
    facts, damaged = directory.newest()
    assert facts["step"] == 4
    assert same_bits(directory.load_state(4), tensors(4))
    assert len(damaged) == 1
    assert "step-00000008" in damaged[0]
    spoil(directory, 4, how)
    with pytest.raises(CheckpointError, match=r"no state of .*00000008.*00000004.* Remove .*states to begin"):
        directory.newest()


def test_states_after_the_one_that_a_run_goes_on_from_are_removed(tmp_path: Path) -> None:
    """Otherwise a damaged one counts as the newest, and the whole ones before it are removed as old."""
    directory = RunDirectory(tmp_path)
    save(directory, 4, 8)
    (tmp_path / "states" / "step-00000009.partial").mkdir()
    directory.drop_after(4)
    assert [file.name for file in (tmp_path / "states").iterdir()] == ["step-00000004"]


def test_a_state_of_a_version_without_checksums_is_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    save(directory, 4)
    file = tmp_path / "states" / "step-00000004" / "state.json"
    facts = json.loads(file.read_text())
    del facts["sha256"]
    file.write_text(json.dumps(facts))
    check_whole(directory, 4)


@pytest.mark.parametrize("left", [0, 7, 30, -1])
def test_a_state_cut_short_is_refused_not_read(left: int, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    save(directory, 4)
    file = tmp_path / "states" / "step-00000004" / "state.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:left])
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        directory.check_state(4)
    file.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        directory.check_state(4)


def test_a_tensor_of_a_kind_that_no_state_has_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    save(directory, 4)
    header = json.dumps({"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "states" / "step-00000004" / "state.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    file.with_name("state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.safetensors: tensor 'x' is I64; it is no state"):
        directory.check_state(4)


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    """Not by permissions: the tests may run as root, who may write everywhere."""
    (tmp_path / "file").write_text("")
    inside_a_file = RunDirectory(tmp_path / "file" / "run")
    with (
        pytest.raises(CheckpointError, match=r"file/run cannot be written: Not a directory"),
        inside_a_file.locked(),
    ):
        pass
    with pytest.raises(CheckpointError, match=r"step-00000001 cannot be written: Not a directory"):
        save(inside_a_file, 1)


def test_a_full_disk_keeps_the_last_state_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    save(directory, 1)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dgemma.training.run_directory.write_file", full)
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be written: No space left on device"):
        save(directory, 2, keep=1)
    assert directory.states() == [1]
    check_whole(directory, 1)


LOCKED = """
import sys
from dgemma.errors import InputError
from dgemma.training.run_directory import RunDirectory
try:
    with RunDirectory(sys.argv[1]).locked():
        print("in", flush=True)
        sys.stdin.read()
except InputError as error:
    print(error, flush=True)
"""


def other_process(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOCKED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="there is no flock")
def test_a_second_process_is_refused_while_the_first_runs_and_not_after_it_was_killed(tmp_path: Path) -> None:
    with other_process(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "in\n"
        with pytest.raises(InputError, match=r"is being written by another process; wait for it, or choose"):
            RunDirectory(tmp_path).locked().__enter__()
        with RunDirectory(tmp_path / "other").locked():
            pass
        first.kill()
        first.wait()
    with RunDirectory(tmp_path).locked(), other_process(tmp_path) as second:
        said, _ = second.communicate()
        assert said == f"{tmp_path} is being written by another process; wait for it, or choose another.\n"
    with RunDirectory(tmp_path).locked():  # and again, after our own end
        pass


def test_a_lock_is_given_back_when_the_run_fails(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(ZeroDivisionError), directory.locked():
        raise ZeroDivisionError
    with directory.locked():
        pass


def test_without_flock_a_run_goes_on_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with RunDirectory(tmp_path).locked(), RunDirectory(tmp_path).locked():
        pass


def test_the_recipe_is_written_as_it_is(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_recipe({"model": "Ünïcode", "noise": {"canvas_len": None}})
    assert json.loads((tmp_path / "recipe.json").read_text(encoding="utf-8")) == {
        "model": "Ünïcode",
        "noise": {"canvas_len": None},
    }


def test_the_result_has_a_place_of_its_own_by_kind(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path).result == {"lora": tmp_path / "adapter", "all": tmp_path / "model"}


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1.0}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a was 1 and is 2"]),
        ({"a": None}, {"a": {"b": 1}}, ['a was null and is {"b": 1}']),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.c was 2 and is 3"]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": "x"}}}, ['a.b.c was 1 and is "x"']),
        ({"a": 1}, {}, ["a was 1 and is null"]),
        ({}, {"a": [1, 2]}, ["a was null and is [1, 2]"]),
    ],
)
def test_differences_are_named_with_both_values(
    before: dict[str, Any], now: dict[str, Any], found: list[str]
) -> None:
    assert differences(before, now) == found


def test_a_recipe_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere cannot be written: No such file"):
        RunDirectory(tmp_path / "nowhere").write_recipe({})
