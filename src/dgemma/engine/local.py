"""The engine in the caller's own thread: what the Python API runs on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from dgemma.engine.engine import Engine
from dgemma.engine.memory import Memory
from dgemma.engine.scheduler import Limits
from dgemma.engine.service import EngineRequest, Failed
from dgemma.events import Event, Finish
from dgemma.model.stack import Stack
from dgemma.text.tokenizer import Tokenizer

PAGE_LEN = 32
SLOTS = 64
PIECE = 1024


class LocalEngine:
    """Calls in several threads, or streams that are read in turn, share steps.

    Nobody runs ahead of its reader: an answer with unread events rests. Memory grows with what is asked for.
    """

    def __init__(self, stack: Stack, tokenizer: Tokenizer | None) -> None:
        memory = Memory(page_len=PAGE_LEN, window=stack.config.window)
        limits = Limits(slots=SLOTS, piece=PIECE, block=stack.execution.encode_block)
        self._engine = Engine({None: stack}, memory, limits, tokenizer=tokenizer)
        self._lock = threading.Lock()
        self._mail: dict[int, deque[Event | Failed]] = {}

    def run(self, requests: Sequence[EngineRequest]) -> Iterator[Event]:
        """The events of all requests as they happen. Refuses at once; computes when it is read."""
        with self._lock:
            self._engine.have_room_for(requests)
        return self._events(requests)

    def _events(self, requests: Sequence[EngineRequest]) -> Iterator[Event]:
        mail: deque[Event | Failed] = deque()
        numbers: list[int] = []
        unfinished = len(requests)
        try:
            with self._lock:
                for request in requests:
                    numbers.append(self._engine.add(request))
                    self._mail[numbers[-1]] = mail
            while unfinished:
                if not mail:
                    self._step(mail)
                event = mail.popleft()
                if isinstance(event, Failed):
                    raise event.error
                unfinished -= isinstance(event, Finish)
                yield event
        finally:
            with self._lock:
                for number in numbers:
                    self._engine.cancel(number)
                    del self._mail[number]

    def _step(self, mail: deque[Event | Failed]) -> None:
        with self._lock:
            while not mail:
                resting = [number for number, box in self._mail.items() if box]
                told = self._engine.step(resting)
                if not told and not self._engine.num_computed:
                    # Who rests has every slot: somebody must run ahead.
                    told = self._engine.step()
                for number, event in told:
                    self._mail[number].append(event)
