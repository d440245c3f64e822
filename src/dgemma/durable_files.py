"""Files that a crash leaves whole: replaced at once, appended line by line, one writer at a time. No torch.

A killed process loses nothing that it handed to the operating system; a power cut loses what was not forced
to disk. A replaced file is forced to disk before it gets its name. A file that a later run goes on from has
its SHA-256 noted in another file: a disk may give back zeros of the right length.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from dgemma.errors import CheckpointError, InputError

SYNC_SECONDS = 1.0
"""An append-only file is forced to disk at most this often, and when it is closed."""
_PARTIAL = ".dgemma-{}.partial"
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)  # a device, or a file system that cannot sync a directory


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` at the end of the block, at once; a link is replaced too."""
    partial = path.with_name(_PARTIAL.format(secrets.token_hex(8)))
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            _sync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_directory(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to disk: new, replaced and removed ones."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory and keep other writers out of it; what a killed one left half written is removed."""
    with ExitStack() as opened:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if os.name == "posix":
                # The directory itself is locked: a checkpoint gets no file that it does not need.
                descriptor = os.open(directory, os.O_RDONLY)
                opened.callback(os.close, descriptor)
                _lock(descriptor, directory)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error.strerror}.") from None
        for left in directory.glob(_PARTIAL.format("*")):
            with suppress(OSError):
                left.unlink()
        yield


class LineFile:
    """A file of lines that is only appended to, locked until it is closed.

    Each line goes to the operating system at once, and to the disk within SYNC_SECONDS of the next line,
    with `sync`, or at the end. A power cut costs the lines since then; `whole_lines` drops what it tore.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        try:
            _lock(self._file.fileno(), path)
        except InputError:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def append(self, line: bytes) -> None:
        while line:  # a nearly full disk writes a part, and raises at the next write
            line = line[self._file.write(line) :]
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        _sync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self.sync()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def whole_lines(content: bytes) -> bytes:
    """The lines up to a torn one: one without an end, or with zeros in place of lost blocks."""
    content = content.partition(b"\0")[0]
    return content[: content.rfind(b"\n") + 1]


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"{path} is being written by another process; wait for it, or choose another.", field="out"
        ) from None
    except OSError:  # a file system without locks
        return


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
