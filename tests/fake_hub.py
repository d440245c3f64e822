"""A hub on loopback: the few endpoints huggingface_hub uses to list and fetch a model, and their faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

NAME = "someone/tiny"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
SHARDED: dict[str, bytes] = {
    "config.json": b'{"model_type": "fake"}',
    "model.safetensors.index.json": INDEX,
    SHARDS[0]: b"first" * 20_000,
    SHARDS[1]: b"second" * 20_000,
    "tokenizer.json": b"{}",
    "README.md": b"# tiny",
}
NOT_READ: dict[str, bytes] = {
    "pytorch_model.bin": b"\x80\x04cos\nsystem\n",
    "training_args.pt": b"\x80\x04",
    "original/model.safetensors": b"twice" * 100,
    ".gitattributes": b"*.bin",
}


@dataclass
class FakeHub:
    """Repositories by name, what was asked of them, and what shall go wrong."""

    address: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range
    breaks: dict[str, list[int]] = field(default_factory=dict)  # bytes to send before each cut, by file
    stalls: dict[str, threading.Event] = field(default_factory=dict)  # half a file, then wait
    refuse: tuple[int, str] | None = None  # status and X-Error-Code of every answer
    renamed: dict[str, str] = field(default_factory=dict)  # a commit without changes, by the one before
    raw_answer: bytes | None = None  # what every listing says instead
    quantized: dict[str, list[str]] = field(default_factory=dict)  # repositories of quantized forms, by base

    def commit(self, name: str) -> str:
        """Changes with any content, as git's does."""
        tree = sorted((file, _etag(content)) for file, content in self.repos[name].items())
        commit = _etag(repr(tree).encode())[:40]
        return self.renamed.get(commit, commit)

    def fetched(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.requests if _is_get(method, path)]

    def ranges(self, file: str) -> list[str | None]:
        return [r for method, path, r in self.requests if _is_get(method, path) and path.endswith(file)]


def _is_get(method: str, path: str) -> bool:
    return method == "GET" and "/resolve/" in path


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.refuse:
            status, code = self.hub.refuse
            return self.answer(status, b"", {"X-Error-Code": code} if code else {})
        if path == "/api/models":
            wanted = parse_qs(urlsplit(self.path).query)["filter"][0]
            found = self.hub.quantized.get(wanted.removeprefix("base_model:quantized:"), [])
            return self.answer(200, json.dumps([{"id": name, "modelId": name} for name in found]).encode())
        listing = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").split("/")  # "", owner, name, revision|resolve, R, file
        name = "/".join(parts[1:3])
        if name not in self.hub.repos:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if parts[4] not in ("main", self.hub.commit(name)):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return self.listing(name) if listing else self.file(name, "/".join(parts[5:]))

    def listing(self, name: str) -> None:
        siblings = []
        for file, content in self.hub.repos[name].items():
            entry = {"rfilename": file, "size": len(content), "blobId": _etag(content)}
            if file.endswith(".safetensors"):
                entry["lfs"] = {"size": len(content), "sha256": _etag(content), "pointerSize": 1}
            siblings.append(entry)
        found = {"id": name, "sha": self.hub.commit(name), "siblings": siblings}
        self.answer(200, self.hub.raw_answer or json.dumps(found).encode())

    def file(self, name: str, file: str) -> None:
        content = self.hub.repos[name].get(file)
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": self.hub.commit(name)}
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        cuts = self.hub.breaks.get(file)
        if self.command == "GET" and cuts:
            return self.answer(206 if asked else 200, body[: cuts.pop(0)], headers, promised=len(body))
        if self.command == "GET" and file in self.hub.stalls:
            self.answer(200, body[: len(body) // 2], headers, promised=len(body))
            self.wfile.flush()
            self.hub.stalls[file].wait(300)
            return None
        return self.answer(206 if asked else 200, body, headers)

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, promised: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if promised is None else promised))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        for event in hub.stalls.values():
            event.set()
        server.shutdown()
        thread.join()
        server.server_close()
        huggingface_hub.close_session()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, home: Path, *, offline: bool = False) -> None:
    """What HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE set; huggingface_hub reads them at import only."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(home / "agents.json"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


def environment(address: str, home: Path, **more: str) -> dict[str, str]:
    """The same for a process of its own."""
    return {"HF_ENDPOINT": address, "HF_HOME": str(home), "PATH": "/usr/bin:/bin", **more}
