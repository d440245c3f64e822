"""The compile worker within this process, so that a test can watch or replace the compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dgemma.server.compile_worker import AbandonRequest, CompileReply, CompileRequest, CompileWorker


class CompileInProcess:
    """In place of `CompileProcess`."""

    def __init__(self, compiler: Any) -> None:
        self._pending: dict[int, Callable[[CompileReply], None]] = {}
        self._lock = threading.Lock()  # the process has one thread that reads
        self.worker = CompileWorker(compiler, lambda reply: self._pending.pop(reply.id)(reply))

    def ask(self, request: CompileRequest, on_reply: Callable[[CompileReply], None]) -> bool:
        self._pending[request.id] = on_reply
        with self._lock:
            self.worker.receive(request)
        return True

    def abandon(self, id_: int) -> None:
        with self._lock:
            self.worker.receive(AbandonRequest(id_))

    def end(self) -> None:
        pass
