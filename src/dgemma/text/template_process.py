"""The caller's side of `template_worker.py`: one process, started when needed and again after its end.

The process is a new Python, not a fork: a fork of a process with threads may hold their locks for ever. It
reads its requests from a pipe and ends when that is closed, at the latest with this process.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dgemma.errors import DgemmaError
from dgemma.text.template_protocol import MAX_CPU_SECONDS, SIZE_BYTES, ReplyKind, decode

# By the clock, long enough for a busy machine. The worker limits its processor time itself, not on Windows.
MAX_SECONDS = 30.0


@dataclass(frozen=True)
class TemplateReply:
    kind: ReplyKind
    text: str  # what was rendered, or what went wrong


class TemplateProcess:
    """Asks the worker. Safe to use from several threads; they take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, source: str, names: tuple[str, ...], variables: Mapping[str, Any] | None) -> TemplateReply:
        """Render a template with variables; without them, compile it: see `template_worker`."""
        request = pickle.dumps((source, names, variables))
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.end()
                self._process = _start()
            try:
                reply = _exchange(self._process, request)
            except BaseException:  # such as Ctrl-C: the next caller must not receive this reply
                self.end()
                raise
            if reply is None:
                return TemplateReply(ReplyKind.LIMIT, _reason(self.end()))
            found = TemplateReply(ReplyKind(reply[:1]), decode(reply[1:]))
            if found.kind is ReplyKind.LIMIT:  # its memory may be in pieces
                self.end()
            return found

    def end(self) -> int | None:
        """End the worker, if it runs -> its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        _close_pipes(process)
        return process.wait()

    def forget(self) -> None:
        """In a forked process: the worker is the parent's."""
        self._lock = threading.Lock()
        if self._process is not None:
            _close_pipes(self._process)  # else the worker would outlive its parent
            self._process.returncode = 0  # nobody to wait for
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    # With the paths of this process, wherever they came from; `-S` leaves out the search for them.
    code = f"import sys; sys.path[:] = {sys.path!r}; from dgemma.text.template_worker import main; main()"
    try:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process
        )
    except OSError as error:
        raise DgemmaError(
            f"the process that renders chat templates cannot be started with {sys.executable!r}: "
            f"{error.strerror}. Run dgemma in a Python that can start processes."
        ) from None


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """The reply; None if the worker ended before it."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(MAX_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(len(request).to_bytes(SIZE_BYTES, "little") + request)
        process.stdin.flush()
        size = int.from_bytes(process.stdout.read(SIZE_BYTES), "little")
        reply = process.stdout.read(size)
        return reply if size and len(reply) == size else None
    except BrokenPipeError:
        return None
    finally:
        timer.cancel()


def _reason(code: int | None) -> str:
    if code == -getattr(signal, "SIGPROF", 0):
        return f"more than {MAX_CPU_SECONDS:g} seconds of processor time"
    return f"its process ended with code {code}: too much time or memory"


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # what was not sent is lost with its reader
            pipe.close()


TEMPLATES = TemplateProcess()
atexit.register(TEMPLATES.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TEMPLATES.forget)
