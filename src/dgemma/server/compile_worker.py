"""The process that compiles response formats. `compile_pool.py` starts it and asks it.

Compiling is Python that holds the interpreter lock. In the server's process it would slow down the engine,
which needs the lock after each operation, and the event loop; here the operating system shares the processor.
Both sides are this package, so that messages are pickled.
"""

from __future__ import annotations

import enum
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dgemma.errors import InputError
from dgemma.server.fair_turns import AbandonedError, CompileJob, FairTurns
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.response_format import ResponseFormat
from dgemma.structured_output.token_dfa import TokenDFA
from dgemma.worker_process import limit_memory, read_message, write_message

# A quarter of a core that the server could use as well.
_NICENESS = 5
# More than with the vocabulary alone. It counts addresses: threads have many that they do not use.
_MAX_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True)
class CompileRequest:
    id: int
    response_format: ResponseFormat
    allow_thought: bool
    tenant: str


@dataclass(frozen=True)
class AbandonRequest:
    """Nobody waits for this compilation any more."""

    id: int


class CompileRefusal(NamedTuple):
    """The format cannot be compiled. Not the error itself: its traceback holds all that was built."""

    message: str
    field: str | None
    code: str


class CompileOutcome(enum.Enum):
    FULL = enum.auto()  # too many compile already
    DISPLACED = enum.auto()  # it took long, and others wait


class CompileFailure(NamedTuple):
    """A mistake of ours."""

    text: str


@dataclass(frozen=True)
class CompileReply:
    id: int
    result: TokenDFA | CompileRefusal | CompileOutcome | CompileFailure
    used_s: float  # of the processor


class CompileWorker:
    """Compiles in a thread for each request."""

    def __init__(self, compiler: GrammarCompiler, send: Callable[[CompileReply], None]) -> None:
        self._compiler = compiler
        self._send = send
        self._turns = FairTurns()
        self._jobs: dict[int, CompileJob] = {}

    def receive(self, request: CompileRequest | AbandonRequest) -> None:
        """Called by one thread."""
        if isinstance(request, AbandonRequest):
            if (job := self._jobs.get(request.id)) is not None:
                self._turns.abandon(job)
        elif not self._turns.make_room(request.tenant):
            self._send(CompileReply(request.id, CompileOutcome.FULL, 0.0))
        else:
            job = self._jobs[request.id] = self._turns.add(request.tenant)
            # A daemon: a process that ends waits for no compilation.
            threading.Thread(target=self._work, args=(request, job), daemon=True).start()

    def _work(self, request: CompileRequest, job: CompileJob) -> None:
        result: TokenDFA | CompileRefusal | CompileOutcome | CompileFailure
        try:
            self._turns.begin(job)
            result = self._compiler.compile(
                request.response_format,
                allow_thought=request.allow_thought,
                on_check=lambda: self._turns.give_way(job),
            ).token_dfa
        except InputError as error:
            result = CompileRefusal(str(error), error.field, error.code)
        except (AbandonedError, MemoryError):
            result = CompileOutcome.DISPLACED
        except Exception:
            result = CompileFailure(traceback.format_exc())
        used_s = self._turns.end(job)
        del self._jobs[request.id]
        self._send(CompileReply(request.id, result, used_s))


def main() -> None:
    """The first message is the compiler; requests follow until the caller closes the pipe."""
    if (message := read_message(sys.stdin.buffer)) is None:
        return
    compiler = pickle.loads(message)  # noqa: S301, the caller is our own package
    limit_memory(_MAX_MEMORY_BYTES)
    if sys.platform != "win32":
        os.nice(_NICENESS)
    lock = threading.Lock()

    def send(reply: CompileReply) -> None:
        content = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        with lock:
            write_message(sys.stdout.buffer, content)

    worker = CompileWorker(compiler, send)
    while (message := read_message(sys.stdin.buffer)) is not None:
        worker.receive(pickle.loads(message))  # noqa: S301
    os._exit(0)  # without waiting for threads that compute
