"""The caller's side of `template_worker.py`: one process, started when needed and again after its end."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dgemma.text.template_protocol import MAX_CPU_SECONDS, ReplyKind, decode
from dgemma.worker_process import close_pipes, end_worker, read_message, start_worker, write_message

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
        return None if process is None else end_worker(process)

    def forget(self) -> None:
        """In a forked process: the worker is the parent's."""
        self._lock = threading.Lock()
        if self._process is not None:
            close_pipes(self._process)  # else the worker would outlive its parent
            self._process.returncode = 0  # nobody to wait for
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    return start_worker("dgemma.text.template_worker", "renders chat templates")


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """The reply; None if the worker ended before it."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(MAX_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    try:
        write_message(process.stdin, request)
        return read_message(process.stdout)
    except BrokenPipeError:
        return None
    finally:
        timer.cancel()


def _reason(code: int | None) -> str:
    if code == -getattr(signal, "SIGPROF", 0):
        return f"more than {MAX_CPU_SECONDS:g} seconds of processor time"
    return f"its process ended with code {code}: too much time or memory"


TEMPLATES = TemplateProcess()
atexit.register(TEMPLATES.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TEMPLATES.forget)
