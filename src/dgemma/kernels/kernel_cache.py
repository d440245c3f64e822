"""Compiled kernels, kept in a directory that only this user can write.

A library is code: the file that is loaded must be whole, and one that this user's compiler wrote. Owner and
mode of the directory and the file are checked on open descriptors, and the checked file itself is loaded, so
that a path exchanged in between changes nothing. The name of a file has a hash of what it was compiled from
and a hash of its content: a truncated or altered file does not match its name and is compiled again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from dgemma.errors import DgemmaError

COMPILERS = ("c++", "g++", "clang++")
_BUILD_SECONDS = 120
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has none; it never comes as far as to open a file


class UnsafeCacheError(DgemmaError):
    """The kernel cache could hold code of another user."""


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/dgemma/kernels`, or in `~/.cache`. A relative variable is ignored, as XDG asks."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "dgemma" / "kernels"


class NoKernelError(DgemmaError):
    """A kernel is not available here; the message says why."""


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this processor, by torch's names."""
    return frozenset(name for name, has in torch.cpu.get_capabilities().items() if has is True)


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def load_kernel(source: Path, flags: Sequence[str], *, needs: Sequence[str], title: str) -> ctypes.CDLL:
    """The library of one C++ file, for a processor that has the instruction sets `needs`, called `title`."""
    if (system := platform.system()) != "Linux":
        raise NoKernelError(f"kernels are compiled on Linux only, and this is {system}")
    if not cpu_flags().issuperset(needs):
        raise NoKernelError(f"this processor has no {title}")
    compiler = find_compiler()
    if compiler is None:
        raise NoKernelError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    try:
        return load_compiled(source, compiler, flags, processor=" ".join(sorted(cpu_flags())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home directory
        raise NoKernelError(f"{source.name} could not be compiled: {error}") from error


def load_compiled(source: Path, compiler: str, flags: Sequence[str], *, processor: str) -> ctypes.CDLL:
    """The library of one C++ file. Compiles it, unless the cache has it for the same inputs.

    processor: what `-march=native` depends on.
    """
    version = _output_of([compiler, "--version"])
    inputs = repr((source.read_bytes(), compiler, version, list(flags), processor)).encode()
    prefix = f"{source.stem}-{hashlib.sha256(inputs).hexdigest()[:24]}-"
    path = cache_directory()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory = _open_own(path)
    try:
        library = _find(path, directory, prefix)
        if library is None:
            library = _store(directory, prefix, _compile(source, compiler, flags))
    finally:
        os.close(directory)
    # The descriptor stays open: the loader knows libraries by name, and no other may get this number.
    return ctypes.CDLL(f"/proc/self/fd/{library}")


def _find(path: Path, directory: int, prefix: str) -> int | None:
    """A descriptor of a cached file that matches its name."""
    for name in sorted(os.listdir(directory)):
        if not (name.startswith(prefix) and name.endswith(".so")):
            continue
        file = _open_own(path / name, directory)
        with open(file, "rb", closefd=False) as reader:
            if name == _name(prefix, reader.read()):
                return file
        os.close(file)
    return None


def _store(directory: int, prefix: str, content: bytes) -> int:
    """A descriptor of a new file. Two processes may store at once: each replaces a name by a whole file."""
    scratch = f".{secrets.token_hex(8)}"
    file = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(content)
        os.fsync(file)
        os.replace(scratch, _name(prefix, content), src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.close(file)
        os.unlink(scratch, dir_fd=directory)
        raise
    return file


def _name(prefix: str, content: bytes) -> str:
    return f"{prefix}{hashlib.sha256(content).hexdigest()}.so"


def _open_own(path: Path, directory: int | None = None) -> int:
    """A descriptor of a file or directory that this user owns and nobody else can write."""
    remedy = f"Delete {path}, or set XDG_CACHE_HOME to a directory of your own."
    try:
        found = os.open(path if directory is None else path.name, os.O_RDONLY | _NO_LINK, dir_fd=directory)
    except OSError as error:
        raise UnsafeCacheError(
            f"the kernel cache {path} cannot be opened ({error.strerror}); it must be yours, and no symbolic "
            f"link. {remedy}"
        ) from None
    state = os.fstat(found)
    problem = None
    if not (stat.S_ISDIR if directory is None else stat.S_ISREG)(state.st_mode):
        problem = "is not a directory" if directory is None else "is not a file"
    elif state.st_uid != os.geteuid():
        problem = f"belongs to user {state.st_uid}; it must belong to user {os.geteuid()}"
    elif state.st_mode & 0o022:
        problem = f"has mode {stat.S_IMODE(state.st_mode):04o}; nobody else may write it"
    if problem is not None:
        os.close(found)
        raise UnsafeCacheError(f"the kernel cache {path} {problem}. {remedy}")
    return found


def _compile(source: Path, compiler: str, flags: Sequence[str]) -> bytes:
    # Not in the cache directory, whose path another user may be able to exchange.
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "kernel.so"
        _output_of([compiler, *flags, "-o", str(library), str(source)])
        return library.read_bytes()


def _output_of(command: list[str]) -> bytes:
    return subprocess.run(  # noqa: S603
        command, check=True, capture_output=True, timeout=_BUILD_SECONDS
    ).stdout
