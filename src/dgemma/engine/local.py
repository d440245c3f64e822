"""The engine in the caller's own thread, for the Python API."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.prefix_cache import BLOCK_SIZE
from dgemma.engine.rank_engine import RankEngine, make_engine
from dgemma.engine.request import EngineRequest, ValidatedRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Failed
from dgemma.events import Event, Finish
from dgemma.model.transformer import Transformer
from dgemma.text.tokenizer import Tokenizer

MAX_NUM_SEQS = 64
CHUNK_SIZE = 1024


class LocalEngine:
    """Calls in several threads, or streams that are read in turn, share steps.

    A sequence with unread events is paused. The KV cache grows with the requests.
    """

    def __init__(self, stack: Transformer, tokenizer: Tokenizer | None) -> None:
        kv_manager = KVCacheManager(block_size=BLOCK_SIZE, window=stack.config.window)
        limits = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS, chunk_size=CHUNK_SIZE, encode_block=stack.execution.encode_block
        )
        self._engine = make_engine({None: stack}, kv_manager, limits, tokenizer=tokenizer)
        self._lock = threading.Lock()
        self._mail: dict[int, deque[Event | Failed]] = {}
        self._left: deque[int] = deque()  # requests that nobody reads any more

    def run(self, requests: Sequence[EngineRequest]) -> Iterator[Event]:
        """The events of all requests as they happen. Validates at once; computes when it is read."""
        with self._lock:
            validated = [
                self._engine.validate(
                    request, prompt_name="the prompt" if len(requests) == 1 else f"prompt {index}"
                )
                for index, request in enumerate(requests)
            ]
            self._engine.reserve(validated)
        return self._events(validated)

    def follow(self) -> None:
        """Take part in the first rank's steps until it ends."""
        assert isinstance(self._engine, RankEngine)
        while self._engine.follow():
            pass

    def _events(self, requests: Sequence[ValidatedRequest]) -> Iterator[Event]:
        mail: deque[Event | Failed] = deque()
        request_ids: list[int] = []
        unfinished = len(requests)
        try:
            with self._lock:
                for request in requests:
                    request_ids.append(self._engine.add(request))
                    self._mail[request_ids[-1]] = mail
            while unfinished:
                if not mail:
                    self._step(mail)
                event = mail.popleft()
                if isinstance(event, Failed):
                    raise event.error
                unfinished -= isinstance(event, Finish)
                yield event
        finally:
            self._left += request_ids
            self._cancel_left()

    def _step(self, mail: deque[Event | Failed]) -> None:
        with self._lock:
            while not mail:
                resting = [request_id for request_id, box in self._mail.items() if box]
                outputs = self._engine.step(resting)
                if not outputs and not self._engine.num_computed:
                    # Paused sequences have every slot: run all of them.
                    outputs = self._engine.step()
                for request_id, event in outputs:
                    self._mail[request_id].append(event)
        self._cancel_left()

    def _cancel_left(self) -> None:
        """Cancel at once, or leave it to the thread that steps.

        That may be this thread: the garbage collector closes a forgotten stream at any point of a step.
        """
        if self._lock.acquire(blocking=False):
            try:
                while self._left:
                    request_id = self._left.popleft()
                    self._engine.cancel(request_id)
                    self._mail.pop(request_id, None)
            finally:
                self._lock.release()
