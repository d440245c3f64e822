"""Only a whole library that this user compiled is loaded; anything else is compiled again or refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dgemma.kernels import kernel_cache
from dgemma.kernels.kernel_cache import UnsafeCacheError, cache_directory, load_compiled

COMPILER = shutil.which("c++") or ""
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not COMPILER, reason="needs Linux and a C++ compiler"
)
FLAGS = ("-shared", "-fPIC")
STRANGER = 65_533
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can give a file away"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "answer.cpp"
    file.write_text('extern "C" int answer() { return 42; }')
    return file


def answer(source: Path, flags: tuple[str, ...] = FLAGS, processor: str = "any") -> int:
    found: int = load_compiled(source, COMPILER, flags, processor=processor).answer()
    return found


def libraries() -> list[Path]:
    return sorted(cache_directory().glob("*.so"))


def replace_by(file: Path, content: bytes) -> None:
    """A new file of the same name: this process has the old one mapped."""
    file.unlink()
    file.write_bytes(content)
    file.chmod(0o600)


def test_a_library_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(source) == 42
    monkeypatch.setattr(kernel_cache, "_compile", None)
    assert answer(source) == 42
    assert len(libraries()) == 1


def test_nobody_else_can_write_the_cache_under_any_umask(source: Path) -> None:
    before = os.umask(0)
    try:
        answer(source)
    finally:
        os.umask(before)
    assert cache_directory().stat().st_mode & 0o777 == 0o700
    assert libraries()[0].stat().st_mode & 0o777 == 0o600
    assert list(cache_directory().iterdir()) == libraries()  # no scratch file is left


@pytest.mark.parametrize(
    "damaged",
    [lambda good: good[: len(good) // 2], lambda good: b"", lambda good: good[:-1] + bytes([good[-1] ^ 1])],
    ids=["truncated", "empty", "one bit"],
)
def test_a_damaged_library_is_compiled_again(source: Path, damaged: Callable[[bytes], bytes]) -> None:
    answer(source)
    good = libraries()[0].read_bytes()
    replace_by(libraries()[0], damaged(good))
    assert answer(source) == 42
    assert [file.read_bytes() for file in libraries()] == [good]


def test_other_inputs_give_another_library(source: Path, tmp_path: Path) -> None:
    """Source, flags, processor, the compiler's path and its version."""
    answer(source)
    answer(source, (*FLAGS, "-O1"))
    answer(source, processor="other")
    compiler = tmp_path / "compiler"
    for version in (1, 2):
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} || exec {COMPILER} "$@"\n')
        compiler.chmod(0o700)
        load_compiled(source, str(compiler), FLAGS, processor="any")
    source.write_text('extern "C" int answer() { return 43; }')
    assert answer(source) == 43
    assert len({file.name.split("-")[1] for file in libraries()}) == 6


def open_directory() -> None:
    cache_directory().chmod(0o777)


def group_file() -> None:
    libraries()[0].chmod(0o660)


def linked_directory() -> None:
    elsewhere = cache_directory().rename(cache_directory().with_name("elsewhere"))
    cache_directory().symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (open_directory, "has mode 0777; nobody else may write it"),
        (group_file, "has mode 0660; nobody else may write it"),
        (linked_directory, "no symbolic link"),
    ],
)
def test_what_others_could_have_written_is_refused(
    source: Path, change: Callable[[], None], problem: str
) -> None:
    answer(source)
    change()
    with pytest.raises(UnsafeCacheError, match=problem) as caught:
        answer(source)
    assert str(cache_directory()) in str(caught.value)
    assert "set XDG_CACHE_HOME" in str(caught.value)


def test_a_linked_file_is_refused(source: Path) -> None:
    answer(source)
    file = libraries()[0]
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")
    with pytest.raises(UnsafeCacheError, match="no symbolic link"):
        answer(source)


def test_a_directory_in_place_of_a_library_is_refused(source: Path) -> None:
    answer(source)
    file = libraries()[0]
    file.unlink()
    file.mkdir(mode=0o700)
    with pytest.raises(UnsafeCacheError, match="is not a file"):
        answer(source)


def test_the_cache_of_another_user_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(source)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(UnsafeCacheError, match=f"belongs to user {owner}; it must belong to user {STRANGER}"):
        answer(source)


@needs_root
def test_a_library_of_another_user_is_refused(source: Path) -> None:
    answer(source)
    os.chown(libraries()[0], STRANGER, STRANGER)
    with pytest.raises(UnsafeCacheError, match=f"belongs to user {STRANGER}"):
        answer(source)


def test_processes_that_compile_at_once_all_get_a_whole_library(source: Path) -> None:
    code = (
        "import sys, pathlib; from dgemma.kernels.kernel_cache import load_compiled\n"
        "found = load_compiled(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:], processor='any')\n"
        "sys.exit(found.answer())"
    )
    command = [sys.executable, "-c", code, str(source), COMPILER, *FLAGS]
    running = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in running] == [42] * 4
    assert list(cache_directory().iterdir()) == libraries()


def test_a_failed_store_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        answer(source)
    assert list(cache_directory().iterdir()) == []


def test_a_relative_cache_path_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/dgemma/kernels")
