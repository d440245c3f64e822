"""The playground's files, which the package holds: read once, sent as they are, and no other file."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

PAGE = "index.html"
FILES_PATH = "/playground/"
# Model text never becomes HTML, and nothing of another host is loaded. The page holds no inline script or
# style; the one Trusted Types policy is that of the framework's own static templates.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types svelte-trusted-html",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
# A file's name has the digest of its content in it, so that it never changes.
_FOR_EVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class WebFile:
    content: bytes
    packed: bytes
    media_type: str
    etag: str


@cache
def web_files() -> Mapping[str, WebFile]:
    """By path. What is not listed here is not served, whatever a path looks like."""
    folder = resources.files("dgemma") / "data" / "web" / "playground"
    found = {"/": _read(folder / PAGE)}
    for file in (folder / "playground").iterdir():
        found[FILES_PATH + file.name] = _read(file)
    return found


def _read(file: Traversable) -> WebFile:
    content = file.read_bytes()
    return WebFile(
        content=content,
        packed=gzip.compress(content, mtime=0),
        media_type=_TYPES[file.name.rpartition(".")[2]],
        etag=f'"{hashlib.sha256(content).hexdigest()[:16]}"',
    )


def file_response(request: Request, path: str, **headers: str) -> Response:
    """`path`: one of `web_files`."""
    file = web_files()[path]
    is_page = path == "/"
    sent = {
        **PAGE_HEADERS,
        "cache-control": "no-cache" if is_page else _FOR_EVER,
        "etag": file.etag,
        "vary": "Accept-Encoding",
        **headers,
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=sent)
    content = file.content
    if takes_gzip(request.headers.get("accept-encoding", "")):
        content, sent["content-encoding"] = file.packed, "gzip"
    sent["content-type"] = file.media_type
    return Response(content, headers=sent)


def takes_gzip(accepted: str) -> bool:
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
