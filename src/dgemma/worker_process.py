"""Worker processes: a new Python beside this one, with messages through its standard input and output.

It is no fork: a fork of a process with threads may hold their locks for ever. The worker reads requests from
a pipe and ends when that is closed, at the latest with this process. A message is its size and its bytes.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import IO

from dgemma.errors import DgemmaError

if sys.platform != "win32":
    import resource

_SIZE_BYTES = 8


def start_worker(module: str, purpose: str) -> subprocess.Popen[bytes]:
    """Run `main` of a module; `purpose` completes "the process that ...", for an error."""
    # With the paths of this process, wherever they came from; `-S` leaves out the search for them.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"
    try:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process
        )
    except OSError as error:
        raise DgemmaError(
            f"the process that {purpose} cannot be started with {sys.executable!r}: "
            f"{error.strerror}. Run dgemma in a Python that can start processes."
        ) from None


def write_message(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(_SIZE_BYTES, "little") + message)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """None: the other side has ended."""
    header = stream.read(_SIZE_BYTES)
    size = int.from_bytes(header, "little")
    message = stream.read(size) if len(header) == _SIZE_BYTES else b""
    return message if message and len(message) == size else None


def end_worker(process: subprocess.Popen[bytes]) -> int:
    """-> its exit code."""
    process.kill()
    close_pipes(process)
    return process.wait()


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # what was not sent is lost with its reader
            pipe.close()


def limit_memory(num_bytes: int) -> None:
    """In the worker: let this process allocate so much more, then raise MemoryError."""
    if sys.platform == "linux":  # others have no such limit, or do not keep it
        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + num_bytes
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
