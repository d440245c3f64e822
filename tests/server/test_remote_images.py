"""Images are fetched from public addresses only, at every step, and within limits. All of it on loopback."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.server import remote_images
from dgemma.server.http.settings import Settings
from dgemma.server.images import ImageLoader
from dgemma.server.remote_images import Address, RemoteImages, is_public
from server.served import CHAT, error_of, post, run
from server.test_images import GEOMETRY, PATCHES, PICTURE, CountingProcess, chat, chat_part, seeing

Answer = Callable[[str, dict[str, str]], bytes | Awaitable[bytes]]
HOST = "pictures.example"


class Site:
    """A server on loopback. answer: path and headers -> the bytes of a response."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._tls = tls
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.port = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            path = first.split(" ")[1]
            self.asked.append((path, headers))
            reply = self._answer(path, headers)
            writer.write(reply if isinstance(reply, bytes) else await reply)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Site]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()


def response(
    content: bytes = PICTURE, status: str = "200 OK", kind: str | None = "image/png", **headers: object
) -> bytes:
    lines = {"content-length": len(content), "connection": "close"}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    if kind is not None:
        lines["content-type"] = kind
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + content


class Names:
    """A resolver that knows some names, each with its answers in turn; the last one stays."""

    def __init__(self, **known: Sequence[Sequence[str]]) -> None:
        self._known = {f"{name}.example": list(answers) for name, answers in known.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self._known.get(host)
        if answers is None:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


def is_here(address: Address) -> bool:
    """In the place of `is_public`: this machine is the internet."""
    return address == ipaddress.ip_address("127.0.0.1")


def fetched(
    answer: Answer, path: str = "/a.png", *, names: Names | None = None, scheme: str = "http", **options: Any
) -> tuple[bytes | InputError, Site]:
    site = Site(answer, options.pop("tls", None))
    options = {"max_bytes": 1 << 20, "timeout_s": 60.0, "is_public": is_here, **options}
    remote = RemoteImages(resolve=names or Names(pictures=[["127.0.0.1"]]), **options)

    async def fetch() -> bytes | InputError:
        async with site.open():
            url = path if "://" in path else f"{scheme}://{HOST}:{site.port}{path}"
            try:
                return await remote.fetch(url.replace("PORT", str(site.port)))
            except InputError as error:
                return error

    return run(fetch()), site


def refused(*args: Any, **options: Any) -> str:
    found, _ = fetched(*args, **options)
    assert isinstance(found, InputError)
    assert found.field == "image"
    assert found.code in ("failed_to_download_image", "image_too_large")
    return str(found)


def test_an_image_is_fetched_as_a_browser_would_without_saying_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # which would resolve names itself
    found, site = fetched(lambda path, headers: response(), "/a.png?size=1#part")
    assert found == PICTURE
    ((path, headers),) = site.asked
    assert path == "/a.png?size=1"
    assert headers.pop("host") == f"{HOST}:{site.port}"
    assert headers == {
        "accept": "image/*", "accept-encoding": "identity", "user-agent": "dgemma",
        "connection": "keep-alive",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["image/anything", "application/octet-stream", "IMAGE/PNG; q=1", None])
def test_types_of_images_are_taken(kind: str | None) -> None:
    assert fetched(lambda path, headers: response(kind=kind))[0] == PICTURE


PRIVATE = (
    "127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "198.18.0.1", "240.0.0.1",  # noqa: S104
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1",
    "64:ff9b:1::1", "2001:0:a00:1::f5ff:fffe",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_never_connected_to(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    names = Names(pictures=[[address]])
    found, site = fetched(lambda path, headers: response(), names=names, is_public=is_public)
    assert isinstance(found, InputError)
    assert "the host 'pictures.example' is not on the public internet" in str(found)
    assert site.asked == []


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450:4001::1"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_an_address_within_another_is_judged_as_itself(address: ipaddress.IPv4Address) -> None:
    for form in (f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}"):
        assert not is_public(ipaddress.ip_address(form)) or is_public(address)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:PORT/", "http://[::1]:PORT/", "http://[::ffff:127.0.0.1]:PORT/",
            "http://localhost:PORT/", "http://2130706433:PORT/", "http://127.1:PORT/", "http://0:PORT/",
            "http://0x7f.1:PORT/", "http://017700000001:PORT/"],
)  # fmt: skip
def test_this_machine_is_refused_however_it_is_spelled(url: str) -> None:
    """With the machine's own resolver."""

    async def real(host: str, port: int) -> Sequence[str]:
        return await remote_images.resolve(host, port)

    found, site = fetched(
        lambda path, headers: response(),
        url,
        is_public=is_public,
        names=real,  # type: ignore[arg-type]
    )
    assert isinstance(found, InputError)
    assert "is not on the public internet" in str(found) or "has no address" in str(found)
    assert site.asked == []


def test_a_name_with_one_private_address_is_refused() -> None:
    names = Names(pictures=[["127.0.0.1", "10.0.0.1"]])
    assert "is not on the public internet" in refused(lambda path, headers: response(), names=names)


def test_a_name_is_looked_up_once_and_the_checked_address_is_connected_to() -> None:
    """A second look-up would find the address of a neighbour."""
    names = Names(pictures=[["127.0.0.1"], ["127.0.0.2"]])
    found, site = fetched(lambda path, headers: response(), names=names)
    assert found == PICTURE
    assert names.asked == [HOST]
    assert len(site.asked) == 1


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    names = Names(pictures=[["127.0.0.3", "127.0.0.1"]])
    found, _ = fetched(
        lambda path, headers: response(), names=names, is_public=lambda address: address.is_loopback
    )
    assert found == PICTURE


def moved(target: str, status: str = "302 Found") -> Answer:
    return lambda path, headers: response() if path == "/end" else response(b"", status, location=target)


@pytest.mark.parametrize("target", ["/end", "end", "//pictures.example:PORT/end"])
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See", "307 Go", "308 Go"])
def test_redirects_are_followed(target: str, status: str) -> None:
    site: Site

    def answer(path: str, headers: dict[str, str]) -> bytes:
        port = headers["host"].rpartition(":")[2]
        return moved(target.replace("PORT", port), status)(path, headers)  # type: ignore[return-value]

    found, site = fetched(answer)
    assert found == PICTURE
    assert len(site.asked) == 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://inner.example/x", "the host 'inner.example' is not on the public internet"),
        ("http://169.254.169.254/latest/meta-data", "'169.254.169.254' is not on the public internet"),
        ("http://nowhere.example/x", "the host 'nowhere.example' has no address"),
        ("file:///etc/passwd", "redirects to an address of 'file'; only http and https"),
        ("ftp://pictures.example/x", "redirects to an address of 'ftp'"),
        ("data:image/png;base64,xx", "redirects to an address of 'data'"),
        ("http://user:secret@pictures.example/x", "redirects to an address with a name or password"),
        ("http://pictures.example:99999/", "redirects to an address without a host, or with a port"),
        ("http://a\x01b/", "cannot be fetched: Invalid non-printable ASCII character in URL"),
        ("/" + "x" * 5000, "has an address of more than 4096 characters"),
        ("/again", "redirects more than 3 times"),
    ],
)
def test_each_redirect_is_checked(target: str, message: str) -> None:
    class Known(Names):
        async def __call__(self, host: str, port: int) -> Sequence[str]:
            return [host] if host[0].isdigit() else await super().__call__(host, port)

    names = Known(pictures=[["127.0.0.1"]], inner=[["10.0.0.1"]])
    assert message in refused(moved(target), names=names)


def test_a_redirect_back_to_the_same_name_is_looked_up_again() -> None:
    names = Names(pictures=[["127.0.0.1"], ["10.0.0.1"]])
    found, site = fetched(moved("/end"), names=names)
    assert "is not on the public internet" in str(found)
    assert [path for path, _ in site.asked] == ["/a.png"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (response(status="404 Not Found"), "the answer has status 404"),
        (response(status="304 Not Modified"), "the answer has status 304"),
        (response(status="206 Partial Content"), "the answer has status 206"),
        (response(kind="text/html"), "is of type 'text/html', which is no image"),
        (response(content_encoding="gzip"), "came compressed"),
        (response(content_length=1 << 40), "has more than 1,048,576 bytes"),
        (response(content_length="9" * 30), "cannot be fetched: bad Content-Length"),
        (response(content_length=len(PICTURE) + 1), "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n" + bytes(2 << 20), "has more than 1,048,576"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000 + b"\r\n", "cannot be fetched"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
    ],
)
def test_wrong_answers_are_refused(answer: bytes, message: str) -> None:
    assert message in refused(lambda path, headers: answer)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://", "has an address without a host"),
        ("http://a\x01b/", "has an address that cannot be read"),
        ("http://name:word@pictures.example/", "has an address with a name or password, which is not sent"),
        ("http://pictures.example/" + "x" * 5000, "has an address of more than 4096 characters"),
        ("http://nowhere.example/", "the host 'nowhere.example' has no address"),
        ("http://pictures.example:1/", "cannot be fetched"),
    ],
)
def test_wrong_addresses_are_refused(url: str, message: str) -> None:
    found = refused(lambda path, headers: response(), url)
    assert message in found
    assert len(found) < 400


def test_a_slow_answer_ends_at_the_limit() -> None:
    async def never() -> bytes:
        await asyncio.sleep(60)
        return b""

    message = refused(lambda path, headers: never(), timeout_s=0.2)
    assert "did not arrive within 0.2 seconds" in message


def test_the_certificate_must_be_the_name_s(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1",
             "-addext", f"subjectAltName=DNS:{HOST}", "-keyout", key, "-out", certificate],
            check=True, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    trust = ssl.create_default_context(cafile=certificate)
    options: dict[str, Any] = {"scheme": "https", "tls": tls}
    found, _ = fetched(lambda path, headers: response(), certificates=lambda: trust, **options)
    assert found == PICTURE
    names = Names(other=[["127.0.0.1"]])
    other = "https://other.example:PORT/"
    message = refused(
        lambda path, headers: response(), other, names=names, certificates=lambda: trust, **options
    )
    assert "cannot be fetched" in message
    assert "cannot be fetched" in refused(lambda path, headers: response(), **options)  # nobody signed it


def test_bytes_are_counted_while_they_arrive() -> None:
    counted: list[int] = []
    site = Site(lambda path, headers: response())
    remote = RemoteImages(
        max_bytes=1 << 20, timeout_s=60.0, is_public=is_here, resolve=Names(pictures=[["127.0.0.1"]])
    )

    async def fetch() -> bytes:
        async with site.open():
            return await remote.fetch(f"http://{HOST}:{site.port}/", counted.append)

    run(fetch())
    assert sum(counted) == len(PICTURE)


def test_a_chat_may_name_an_image_where_that_is_allowed() -> None:
    site = Site(lambda path, headers: response() if path == "/a.png" else response(status="404 Not Found"))
    app, text = seeing(allow_remote_images=True)
    remote = RemoteImages(
        max_bytes=1 << 20, timeout_s=60.0, is_public=is_here, resolve=Names(pictures=[["127.0.0.1"]])
    )
    app.state.images = ImageLoader(
        Settings(allow_remote_images=True), GEOMETRY, process=CountingProcess(), remote=remote
    )

    def asked(path: str) -> Any:
        async def ask() -> Any:
            async with site.open():
                url = f"http://{HOST}:{site.port}{path}"
                return await asyncio.to_thread(post, app, CHAT, chat(chat_part(url)))

        return run(ask())

    assert asked("/a.png").status_code == 200
    assert text.images == [PATCHES]
    reply = asked("/b.png")
    assert (reply.status_code, error_of(reply)["code"]) == (400, "failed_to_download_image")
    assert error_of(reply)["param"] == "messages.0.content.1"
    assert app.state.admission._num_buffered_bytes == 0
