"""Images of requests: found in a body, loaded within limits, placed in the messages of a chat.

`ImageLoader.load` works before a body is validated, in the event loop: it fetches and decodes. What it finds
wrong with an image is raised by `LoadedImages.place`, when the messages are read: so it is attributed to its
field, after all that comes before it. Endpoints know nothing of images but the forms of their parts.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.images.decode import ImageLimits, RgbImage
from dgemma.images.process import IMAGES, ImageProcess
from dgemma.server.http.errors import invalid, shown, timed_out
from dgemma.server.http.settings import Settings
from dgemma.server.remote_images import RemoteImages
from dgemma.server.turns import Turns

IMAGE_TYPES = ("image_url", "input_image", "image")
DETAILS = ("auto", "low", "high")
# Where parts of a message are, in all APIs.
_CONTAINERS = ("content", "output")
_WHITESPACE = " \t\r\n"
_BASE64 = ";base64"

Found = RgbImage | InputError


def image_url(part: object) -> str | None:
    """The address in an image part of chat completions, responses or messages; None: it has none."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return url
        case {"type": "image_url" | "input_image", "image_url": str(url)}:
            return url
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return f"data:{kind};base64,{data}"
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return url
    return None


def image_urls(body: Mapping[str, Any]) -> list[str]:
    """The addresses of all image parts of a body, one that stands twice twice."""
    return [url for value in body.values() if isinstance(value, list) for url in _urls(value)]


def _urls(items: Sequence[object]) -> Iterator[str]:
    for item in items:
        if not isinstance(item, dict):
            continue
        url = image_url(item)
        if url is not None:
            yield url
            continue
        for name in _CONTAINERS:
            if isinstance(inner := item.get(name), list):
                yield from _urls(inner)


def data_url_bytes(url: str, max_bytes: int) -> bytes:
    """The content of a data URL in base64. Its media type says nothing: the content does."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(_BASE64):
        raise InputError.about(
            "image",
            f"is {shown(head)}, which is no data URL in base64; give it as data:image/png;base64,...",
            code="invalid_image",
        )
    if any(space in data for space in _WHITESPACE):  # broken into lines
        data = "".join(data.split())
    data = data.rstrip("=")
    if len(data) * 3 // 4 > max_bytes:
        raise InputError.about(
            "image",
            f"has {len(data) * 3 // 4:,} bytes; at most {max_bytes:,} are taken. Give a smaller one.",
            code="image_too_large",
        )
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InputError.about(
            "image", "is no valid base64; encode the bytes of the file.", code="invalid_image"
        ) from None


@dataclass(frozen=True, kw_only=True)
class LoadedImages:
    """The images of one request by their address, or what is wrong with them."""

    found: Mapping[str, Found] = field(default_factory=dict)
    refusal: str | None = None
    """Why no image is taken at all."""

    @property
    def num_bytes(self) -> int:
        return sum(len(image.pixels) for image in self.found.values() if isinstance(image, RgbImage))

    def place(self, messages: Sequence[Mapping[str, Any]], where: str) -> list[Mapping[str, Any]]:
        """The messages with loaded images in place of the image parts of chat completions.

        where: the client's name of the messages, for errors.
        """
        return [self._placed(message, f"{where}.{number}") for number, message in enumerate(messages)]

    def _placed(self, message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            return message
        parts = [
            self.part(part, f"{where}.content.{number}") if _is_image(part) else part
            for number, part in enumerate(content)
        ]
        return {**message, "content": parts}

    def part(self, part: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The loaded image of an image part, as the chat template takes it."""
        if self.refusal is not None:
            raise invalid(f"{where} is an image, and {self.refusal}", where, "unsupported_value")
        _check_part(part, where)
        url = image_url(part)
        assert url is not None
        found = self.found[url]
        if isinstance(found, InputError):
            named = found.with_field(where)
            raise invalid(str(named), where, named.code)
        return {"type": "image", "image": found}


class ImageLoader:
    """Loads the images of requests: decodes them in a process, fetches them if that is allowed."""

    def __init__(
        self,
        settings: Settings,
        *,
        takes_images: bool,
        process: ImageProcess = IMAGES,
        remote: RemoteImages | None = None,
    ) -> None:
        self._settings = settings
        self._limits = ImageLimits(max_bytes=settings.max_image_bytes, max_pixels=settings.max_image_pixels)
        self._process = process
        self._turns = Turns()
        self._takes_images = takes_images
        self._remote = remote or RemoteImages(
            max_bytes=settings.max_image_bytes, timeout_s=settings.image_timeout_s
        )

    @property
    def max_body_bytes(self) -> int:
        """Of a body with images: as base64 they are a third larger."""
        return self._settings.max_image_bytes * 4 // 3 + 4096 if self._takes_images else 0

    async def load(
        self,
        body: Mapping[str, Any],
        client: str = "",
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> LoadedImages:
        """All images of a body. Raises an ApiError if they are too many, or take too long together.

        client: whose turn it is among others. on_bytes: called with the bytes that are kept; may raise.
        """
        if not self._takes_images:
            return NO_IMAGES
        # A large body may have a million parts.
        urls = await asyncio.to_thread(image_urls, body)
        most = self._settings.max_images
        if len(urls) > most:
            raise invalid(
                f"the request has {len(urls)} images; this server takes at most {most}. Send fewer.",
                None,
                "too_many_images",
            )
        found: dict[str, Found] = {}
        try:
            async with asyncio.timeout(self._settings.image_timeout_s):
                for url in dict.fromkeys(urls):
                    found[url] = await self._load(url, client, on_bytes)
        except TimeoutError:
            raise timed_out(
                f"the images were not read within {self._settings.image_timeout_s:g} seconds; they are too "
                "large, or others were before them."
            ) from None
        return LoadedImages(found=found)

    async def _load(self, url: str, client: str, on_bytes: Callable[[int], None]) -> Found:
        fetched = b""
        try:
            if url[:5].lower() == "data:":
                read = partial(data_url_bytes, url, self._limits.max_bytes)
            elif url[:8].lower().startswith(("http://", "https://")):
                fetched = await self._fetch(url, on_bytes)
                read = partial(bytes, fetched)
            else:
                raise InputError.about(
                    "image",
                    f"is {shown(url)}, which is no address; give a data URL, or one of http or https.",
                )
            image = await self._turns.run(client, lambda: self._process.decode(read(), self._limits))
        except InputError as error:
            return error
        finally:
            on_bytes(-len(fetched))
        on_bytes(len(image.pixels))
        return image

    async def _fetch(self, url: str, on_bytes: Callable[[int], None]) -> bytes:
        if not self._settings.allow_remote_images:
            raise InputError.about(
                "image",
                f"is at {shown(url)}, and this server fetches no images; send the image itself, as a data URL.",
                code="unsupported_value",
            )
        return await self._remote.fetch(url, on_bytes)


NO_IMAGES = LoadedImages(refusal="this model reads text only; leave it out.")


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_TYPES


def _check_part(part: Mapping[str, Any], where: str) -> None:
    """Refuse an image part that is not of one of the known forms."""
    name = "source" if part["type"] == "image" else "image_url"
    known = ("type", name, "detail") if part["type"] == "input_image" else ("type", name)
    _check_names(part, known, where)
    inner, detail = part.get(name), part.get("detail")
    if isinstance(inner, dict):
        _check_names(
            inner,
            ("url", "detail") if name == "image_url" else ("type", "media_type", "data", "url"),
            f"{where}.{name}",
        )
        detail = inner.get("detail", detail)
    if image_url(part) is None:
        forms = {
            "image_url": '{"type": "image_url", "image_url": {"url": ...}}',
            "input_image": '{"type": "input_image", "image_url": ...}',
            "image": '{"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}',
        }
        raise invalid(f"{where} is no image part; give it as {forms[part['type']]}.", where)
    if detail is not None and detail not in DETAILS:
        raise invalid(
            f"{where} has the detail {shown(detail)}; give one of {', '.join(DETAILS)}, or leave it out.",
            where,
        )


def _check_names(entries: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name, value in entries.items():
        if name not in known and value is not None:
            path = f"{where}.{name[:60]}"
            raise invalid(f"unknown field '{path}'{suggestion(name[:60], known)}", path, "unknown_parameter")
