"""Images fetched from the addresses that clients name: from public addresses only, within limits.

A client may name an address that only this server can reach, such as a cloud's metadata or a neighbour
without a password. So each name is resolved here, every address that it has must be public, and the
connection is made to one of those that were checked: a second look-up could give another. Redirects too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from dgemma.errors import InputError
from dgemma.server.http.errors import shown

if TYPE_CHECKING:
    import httpx2

MAX_REDIRECTS = 3
MAX_URL_CHARS = 4096
_MAX_ADDRESSES = 4  # of one name, tried one after another
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "dgemma"}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_IPV4_COMPATIBLE = ipaddress.ip_network("::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name, as text; raises OSError if it has none."""


# Threads of their own: a name server that never answers occupies one for half a minute.
_RESOLVERS = ThreadPoolExecutor(8, thread_name_prefix="resolve")


async def resolve(host: str, port: int) -> Sequence[str]:
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, look_up)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@cache
def _certificates() -> ssl.SSLContext:
    import httpx2

    return httpx2.create_ssl_context(trust_env=False)


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet, also where it is written into another."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    if address.is_site_local or address in _IPV4_COMPATIBLE:
        return False
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(is_public(each) for each in inner if each is not None)


@dataclass(frozen=True, kw_only=True)
class RemoteImages:
    """Fetches images by http and https."""

    max_bytes: int
    timeout_s: float
    """For one image: names, redirects and content together."""
    resolve: Resolve = resolve
    is_public: Callable[[Address], bool] = is_public
    certificates: Callable[[], ssl.SSLContext] = _certificates

    async def fetch(self, url: str, on_bytes: Callable[[int], None] = lambda count: None) -> bytes:
        """The content; an InputError of `image` says what is wrong with the address or the answer.

        on_bytes: called with the size of each part before it is kept; may raise.
        """
        import httpx2

        client = httpx2.AsyncClient(
            headers=_HEADERS,
            follow_redirects=False,  # each is checked
            timeout=self.timeout_s,
            trust_env=False,  # a proxy would resolve names itself
            verify=self.certificates(),
        )
        try:
            async with asyncio.timeout(self.timeout_s), client:
                return await self._follow(client, url, on_bytes)
        except (TimeoutError, httpx2.TimeoutException):
            raise _failed(url, f"did not arrive within {self.timeout_s:g} seconds") from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            raise _failed(url, f"cannot be fetched: {str(error)[:200] or type(error).__name__}") from None

    async def _follow(self, client: httpx2.AsyncClient, url: str, on_bytes: Callable[[int], None]) -> bytes:
        import httpx2

        where = _checked_url(url)
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._get(client, where, url)
            try:
                if not response.has_redirect_location:
                    return await self._content(response, url, on_bytes)
                target = response.headers["location"][: MAX_URL_CHARS + 1]
            finally:
                await response.aclose()
            where = _checked_url(str(httpx2.URL(str(where)).join(target)), url)
        raise _failed(url, f"redirects more than {MAX_REDIRECTS} times")

    async def _get(self, client: httpx2.AsyncClient, where: httpx2.URL, url: str) -> httpx2.Response:
        """The head of the response of the first address that can be reached."""
        import httpx2

        addresses = await self._addresses(where, url)
        for number, address in enumerate(addresses, start=1):
            request = client.build_request(
                "GET",
                where.copy_with(host=str(address)),
                headers={"host": where.netloc.decode("ascii")},
                extensions={"sni_hostname": where.raw_host.decode("ascii")},  # whose certificate it must be
            )
            try:
                return await client.send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise AssertionError("a name has at least one address")

    async def _addresses(self, where: httpx2.URL, url: str) -> Sequence[Address]:
        """Those of a host; all of them must be public."""
        port = where.port or (443 if where.scheme == "https" else 80)
        try:
            found = [ipaddress.ip_address(text) for text in await self.resolve(where.host, port)]
        except (OSError, UnicodeError):
            found = []
        if not found:
            raise _failed(url, f"cannot be fetched: the host {shown(where.host)} has no address")
        if not all(map(self.is_public, found)):
            raise _failed(
                url, f"cannot be fetched: the host {shown(where.host)} is not on the public internet"
            )
        return found[:_MAX_ADDRESSES]

    async def _content(self, response: httpx2.Response, url: str, on_bytes: Callable[[int], None]) -> bytes:
        if response.status_code != 200:
            raise _failed(url, f"cannot be fetched: the answer has status {response.status_code}")
        kind = response.headers.get("content-type", _TYPES[1]).partition(";")[0].strip().lower()
        if not kind.startswith(_TYPES):
            raise _failed(url, f"is of type {shown(kind)}, which is no image")
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise _failed(url, "came compressed, although it was asked for as it is")
        declared = response.headers.get("content-length", "")
        content = bytearray()
        is_fine = not declared.isdecimal() or int(declared) <= self.max_bytes
        if is_fine:
            async for part in response.aiter_raw():
                is_fine = len(content) + len(part) <= self.max_bytes
                if not is_fine:
                    break
                on_bytes(len(part))
                content += part
        if not is_fine:
            raise _failed(url, f"has more than {self.max_bytes:,} bytes", "image_too_large")
        return bytes(content)


def _checked_url(text: str, first: str | None = None) -> httpx2.URL:
    """An address of http or https with a host and without a password."""
    import httpx2

    first = text if first is None else first
    if len(text) > MAX_URL_CHARS:
        raise _failed(first, f"has an address of more than {MAX_URL_CHARS} characters")
    try:
        url = httpx2.URL(text)
        url.raw_host.decode("ascii")
    except (httpx2.InvalidURL, ValueError):
        raise _failed(first, "has an address that cannot be read") from None
    what = "redirects to" if text != first else "has"
    if url.scheme not in ("http", "https"):
        raise _failed(first, f"{what} an address of {shown(url.scheme)}; only http and https are fetched")
    if not url.host or not 0 < (url.port or 1) < 1 << 16:
        raise _failed(first, f"{what} an address without a host, or with a port that none has")
    if url.userinfo:
        raise _failed(first, f"{what} an address with a name or password, which is not sent")
    return url


def _failed(url: str, why: str, code: str = "failed_to_download_image") -> InputError:
    """`url`: the one that the client named, which tells it nothing new."""
    return InputError.about("image", f"at {shown(url)} {why}.", code=code)
