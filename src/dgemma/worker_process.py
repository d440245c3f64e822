"""Worker processes: a new Python beside this one, with messages through its standard input and output.

It is no fork: a fork of a process with threads may hold their locks for ever. The worker reads requests from
a pipe and ends when that is closed, at the latest with this process. A message is its size and its bytes.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from dgemma.errors import DgemmaError

if sys.platform != "win32":
    import resource

_SIZE_BYTES = 8
_READY = b"ready"
START_SECONDS = 300.0


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


def say_ready() -> None:
    """In an `AskedWorker`: what it imports is there, so the time of replies begins."""
    write_message(sys.stdout.buffer, _READY)


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


@contextmanager
def limits(memory_bytes: int, cpu_seconds: float) -> Iterator[None]:
    """In the worker: more memory raises MemoryError; more processor time ends the process."""
    if sys.platform == "win32":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def end_reason(code: int | None, cpu_seconds: float) -> str:
    """Why a worker under `limits` ended before it replied."""
    if code == -getattr(signal, "SIGPROF", 0):
        return f"more than {cpu_seconds:g} seconds of processor time"
    return f"its process ended with code {code}: too much time or memory, or a crash"


class AskedWorker:
    """One worker that answers requests one by one: started when needed, and again after its end.

    Safe to use from several threads; they take turns.
    """

    def __init__(self, module: str, purpose: str, *, max_seconds: float) -> None:
        """max_seconds: for one reply, by the clock. Workers limit themselves; a busy machine may be slow.

        A worker says first that it is ready: what it takes to start is no fault of what is asked.
        """
        self.max_seconds = max_seconds
        self._module = module
        self._purpose = purpose
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def exchange(self, request: bytes, is_last: Callable[[bytes], bool] = lambda reply: False) -> bytes | int:
        """The reply; or the exit code of a worker that ended before it. is_last: end the worker after it."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.end()
                self._process = self._start()
                if not self._becomes_ready(self._process):
                    return self._end_code()
            try:
                reply = self._send(self._process, request)
            except BaseException:  # such as Ctrl-C: the next caller must not receive this reply
                self.end()
                raise
            if reply is None:
                return self._end_code()
            if is_last(reply):
                self.end()
            return reply

    def _end_code(self) -> int:
        code = self.end()
        assert code is not None
        return code

    def end(self) -> int | None:
        """End the worker, if it runs -> its exit code."""
        process, self._process = self._process, None
        return None if process is None else end_worker(process)

    def forget(self) -> None:
        """In a forked process: the worker is the parent's."""
        self._lock = threading.Lock()
        if self._process is not None:
            close_pipes(self._process)  # else the worker would outlive its parent
            self._process.returncode = 0  # nobody to wait for
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        return start_worker(self._module, self._purpose)

    def _becomes_ready(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.stdout is not None
        try:
            with _killed_after(START_SECONDS, process):
                return read_message(process.stdout) == _READY
        except BaseException:  # such as Ctrl-C
            self.end()
            raise

    def _send(self, process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
        """The reply; None if the worker ended before it."""
        assert process.stdin is not None
        assert process.stdout is not None
        with _killed_after(self.max_seconds, process), suppress(BrokenPipeError):
            write_message(process.stdin, request)
            return read_message(process.stdout)
        return None


@contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
