"""The trace that a client asked for: every step of its own engine requests, as lines of a trace file."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dgemma
from dgemma.engine.request import EngineRequest
from dgemma.engine.service import EngineEvent, ServedModel
from dgemma.events import CanvasStep, Commit, Finish
from dgemma.server.text import TextService
from dgemma.trace.recorder import traced_answer, traced_request
from dgemma.trace.trace import TraceCommit, TraceStep
from dgemma.trace.trace_writer import Line, LineWriter

MAX_TRACE_BYTES = 8 << 20  # of the lines of one request


@dataclass(frozen=True)
class TracedModel:
    name: str  # as served
    served: ServedModel
    text: TextService


class CanvasTrace:
    """Lines as things happen. Beyond the limit steps are left out, and the end says so."""

    def __init__(self, model: TracedModel, path: str, max_bytes: int = MAX_TRACE_BYTES) -> None:
        self._writer = LineWriter(lambda token: model.text.token_text(token).text)
        self._model, self._path, self._left = model, path, max_bytes
        self._num_requests = self._first = self._round = 0
        self._is_cut = False

    def head(self) -> Iterator[Line]:
        served = self._model.served
        yield from self._limited(
            [
                self._writer.head(
                    {
                        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                        "command": self._path,
                        "model": {
                            "name": self._model.name,
                            "fingerprint": served.fingerprint,
                            "canvas_len": served.canvas_len,
                            "vocab_size": served.vocab_size,
                        },
                        "versions": {"dgemma": dgemma.__version__},
                    }
                )
            ]
        )

    def begin(self, requests: Sequence[EngineRequest]) -> Iterator[Line]:
        """A round of requests."""
        self._first = self._num_requests
        self._num_requests += len(requests)
        for number, request in enumerate(requests, start=self._first):
            yield from self._limited(self._writer.request(number, traced_request(request, self._round)))
        self._round += 1

    def add(self, index: int, event: EngineEvent) -> Iterator[Line]:
        """An event of the request `index` of the round."""
        number = self._first + index
        if isinstance(event, CanvasStep):
            if not self._is_cut:
                yield from self._limited(self._writer.step(number, TraceStep.of(event)))
        elif isinstance(event, Commit):
            yield from self._limited(self._writer.commit(number, TraceCommit.of(event)))
        elif isinstance(event, Finish):
            yield from self._limited(self._writer.answer(number, traced_answer(event.answer)))

    def end(self) -> Line:
        line = self._writer.end()
        return {"end": {**line["end"], "is_cut": True}} if self._is_cut else line

    def _limited(self, lines: Iterator[Line] | Sequence[Line]) -> Iterator[Line]:
        """Lines of requests, commits and answers always pass: other limits bound them."""
        for line in lines:
            self._left -= len(json.dumps(line))
            self._is_cut |= self._left < 0
            yield line
