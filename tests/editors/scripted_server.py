"""A server that answers requests as it is told, and keeps what it was sent."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 100


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    waits: bool = False  # until the client leaves
    is_last: bool = False  # sent when the client of the first request has left


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    left: threading.Event = field(default_factory=threading.Event)  # the client, without an answer


@dataclass
class ScriptedServer:
    address: str
    answers: list[Answer]
    seen: list[Seen] = field(default_factory=list)


def filled(text: str) -> Answer:
    return Answer(body=json.dumps({"content": text}).encode())


def edited(text: str) -> Answer:
    return Answer(body=json.dumps({"choices": [{"message": {"content": text}}]}).encode())


@contextmanager
def answering(answers: Sequence[Answer] = ()) -> Iterator[ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen = Seen(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            server.seen.append(seen)
            answer = server.answers.pop(0)
            if answer.waits:
                readable, _, _ = select.select([self.connection], [], [], WAIT_S)
                if readable and not self.connection.recv(1):
                    seen.left.set()
                return
            if answer.is_last and not server.seen[0].left.wait(WAIT_S):
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    server = ScriptedServer(f"http://127.0.0.1:{listening.server_port}", list(answers))
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
