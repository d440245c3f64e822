"""A replaced file is the old or the new one; a lock keeps the second writer out; torn lines are dropped."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dgemma import durable_files
from dgemma.durable_files import (
    LineFile,
    locked,
    replacing,
    sha256_of,
    sync_directory,
    whole_lines,
    write_whole,
)
from dgemma.errors import CheckpointError, InputError


def refuse(number: int) -> Callable[..., None]:
    def raise_it(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return raise_it


def test_the_bytes_are_on_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        calls.append(f"sync {kind} {os.fstat(descriptor).st_size if kind == 'file' else ''}".strip())
        sync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_whole(tmp_path / "a", b"hello")
    assert calls == ["sync file 5", "rename", "sync directory"]
    assert (tmp_path / "a").read_bytes() == b"hello"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_fails_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse(28))
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "a", b"new")
    with pytest.raises(TypeError), replacing(tmp_path / "a") as file:
        file.writelines([b"ne", None])  # type: ignore[list-item]
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a", b"old")]


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "a").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "a", b"new")
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "target").read_text() == "mine"


def test_a_file_system_that_cannot_sync_is_no_error_and_a_broken_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(22))
    sync_directory(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(5))
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(tmp_path)


def test_the_checksum_tells_zeros_of_the_same_length_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(bytes(100))
    assert sha256_of(tmp_path / "a") != sha256_of(tmp_path / "b")
    assert len(sha256_of(tmp_path / "a")) == 64


@pytest.mark.skipif(sys.platform == "win32", reason="there is no flock")
def test_a_second_writer_of_a_directory_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with (
        pytest.raises(InputError, match=r"new/out is being written by another process; wait .* choose an"),
        locked(out),
        locked(out),
    ):
        pass
    with locked(out):
        assert list(out.iterdir()) == []  # the lock is no file


def test_what_a_killed_writer_left_is_removed_and_other_files_are_not(tmp_path: Path) -> None:
    for name in (".dgemma-0123.partial", "film.partial", "model.safetensors"):
        (tmp_path / name).touch()
    with locked(tmp_path):
        assert sorted(file.name for file in tmp_path.iterdir()) == ["film.partial", "model.safetensors"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match="file/x cannot be written: Not a directory"),
        locked(tmp_path / "file" / "x"),
    ):
        pass


def test_without_locks_the_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse(95))  # a file system without them
        with locked(tmp_path), locked(tmp_path):
            pass
    monkeypatch.setitem(sys.modules, "fcntl", None)  # Windows
    with locked(tmp_path), locked(tmp_path):
        pass


def test_lines_are_in_the_file_at_once_and_on_disk_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, syncs = 0.0, 0

    def counted(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1

    monkeypatch.setattr(os, "fsync", counted)
    monkeypatch.setattr(durable_files.time, "monotonic", lambda: now)
    path = tmp_path / "lines"
    with LineFile(path) as file:
        file.append(b"1\n")
        assert (path.read_bytes(), syncs) == (b"1\n", 0)
        now = 1.0
        file.append(b"2\n")
        file.append(b"3\n")
        assert (path.read_bytes(), syncs) == (b"1\n2\n3\n", 1)
        with pytest.raises(InputError, match="lines is being written by another process"):
            LineFile(path)
    file.close()
    assert syncs == 2
    with LineFile(path) as again:
        again.truncate(2)
        again.append(b"4\n")
    assert path.read_bytes() == b"1\n4\n"


@pytest.mark.parametrize(
    ("content", "whole"),
    [
        (b"", b""),
        (b"a\nb\n", b"a\nb\n"),
        (b"a\nb", b"a\n"),
        (b"a", b""),
        (b"a\nb\n\0\0\0", b"a\nb\n"),
        (b"a\nb\0\0\nc\n", b"a\n"),  # a lost block in the middle: what follows is not trusted
    ],
)
def test_lines_end_before_the_first_torn_one(content: bytes, whole: bytes) -> None:
    assert whole_lines(content) == whole
