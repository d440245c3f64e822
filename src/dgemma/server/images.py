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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.images.decode import ImageLimits
from dgemma.images.preprocess import ImagePatches, ImageSettings
from dgemma.images.process import IMAGES, ImageProcess
from dgemma.server.http.errors import invalid, shown, timed_out
from dgemma.server.http.settings import Settings
from dgemma.server.remote_images import RemoteImages
from dgemma.server.turns import Turns

# The most soft tokens of an image by its `detail`; None: the checkpoint's own.
DETAILS = {"auto": None, "low": 70, "high": 1120}
# Where parts of a message are, in all APIs.
_CONTAINERS = ("content", "output")
_WHITESPACE = " \t\r\n"
_BASE64 = ";base64"

Found = ImagePatches | InputError


@dataclass(frozen=True)
class _Form:
    """A form of image parts: the names it may have, of which the second has the address, and those in it."""

    names: tuple[str, ...]
    inner_names: tuple[str, ...]
    example: str


_FORMS = {
    "image_url": _Form(
        ("type", "image_url"), ("url", "detail"), '{"type": "image_url", "image_url": {"url": ...}}'
    ),
    "input_image": _Form(("type", "image_url", "detail"), (), '{"type": "input_image", "image_url": ...}'),
    "image": _Form(
        ("type", "source"),
        ("type", "media_type", "data", "url"),
        '{"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}',
    ),
}


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


def image_detail(part: Mapping[str, Any]) -> Any:
    """None: the part says nothing of it."""
    inner = part.get("image_url")
    return (inner if isinstance(inner, dict) else part).get("detail")


def image_parts(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The image parts of a body that have an address, in whichever field and form."""
    return [part for value in body.values() if isinstance(value, list) for part in _parts(value)]


def _parts(items: Sequence[object]) -> Iterator[Mapping[str, Any]]:
    for item in items:
        if not isinstance(item, dict):
            continue
        if image_url(item) is not None:
            yield item
            continue
        for name in _CONTAINERS:
            if isinstance(inner := item.get(name), list):
                yield from _parts(inner)


def without_data(value: object) -> object:
    """A value of a body for the log: images by the beginning of their address."""
    if isinstance(value, list):
        return [without_data(item) for item in value]
    if not isinstance(value, dict):
        return value
    url = image_url(value)
    if url is not None:
        return {"type": value["type"], "image_url": url[:80]}
    return {name: without_data(item) if name in _CONTAINERS else item for name, item in value.items()}


def _key(part: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """What an image is loaded by: its address, and the soft tokens it may have."""
    url, detail = image_url(part), image_detail(part)
    budget = DETAILS.get(detail) if isinstance(detail, str) else None
    return None if url is None else (url, budget)


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
    """The images of one request, or what is wrong with them."""

    found: Mapping[tuple[str, int | None], Found] = field(default_factory=dict)
    refusal: str | None = None
    """Why no image is taken at all."""

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
        if isinstance(part.get("image"), ImagePatches):  # of an earlier request, which JSON cannot forge
            return dict(part)
        _check_part(part, where)
        key = _key(part)
        found = None if key is None else self.found.get(key)
        if found is None:
            raise invalid(f"{where} is an image of an earlier request; send it again.", where)
        if isinstance(found, InputError):
            named = found.with_field(where)
            raise invalid(str(named), where, named.code)
        return {"type": "image", "image": found}


class ImageLoader:
    """Loads the images of requests: decodes them in a process, fetches them if that is allowed."""

    def __init__(
        self,
        settings: Settings,
        image_settings: ImageSettings | None,
        *,
        process: ImageProcess = IMAGES,
        remote: RemoteImages | None = None,
    ) -> None:
        self._settings = settings
        self._limits = ImageLimits(max_bytes=settings.max_image_bytes, max_pixels=settings.max_image_pixels)
        self._process = process
        self._turns = Turns()
        self._image_settings = image_settings  # None: the model takes no images
        self._remote = remote or RemoteImages(
            max_bytes=settings.max_image_bytes, timeout_s=settings.image_timeout_s
        )

    @property
    def takes_any(self) -> bool:
        return self._image_settings is not None

    @property
    def max_body_bytes(self) -> int:
        """Of a body with images: as base64 they are a third larger."""
        return self._settings.max_image_bytes * 4 // 3 + 4096 if self._image_settings is not None else 0

    async def load(
        self,
        body: Mapping[str, Any],
        client: str = "",
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> LoadedImages:
        """All images of a body. Raises an ApiError if they are too many, or take too long together.

        client: whose turn it is among others. on_bytes: called with the bytes that are kept; may raise.
        """
        if self._image_settings is None:
            return NO_IMAGES
        # A large body may have a million parts.
        parts = await asyncio.to_thread(image_parts, body)
        most = self._settings.max_images
        if len(parts) > most:
            raise invalid(
                f"the request has {len(parts)} images; this server takes at most {most}. Send fewer.",
                None,
                "too_many_images",
            )
        found: dict[tuple[str, int | None], Found] = {}
        try:
            async with asyncio.timeout(self._settings.image_timeout_s):
                for key in dict.fromkeys(map(_key, parts)):
                    assert key is not None
                    url, budget = key
                    settings = replace(
                        self._image_settings, max_tokens=budget or self._image_settings.max_tokens
                    )
                    found[key] = await self._load(url, settings, client, on_bytes)
        except TimeoutError:
            raise timed_out(
                f"the images were not read within {self._settings.image_timeout_s:g} seconds; they are too "
                "large, or others were before them."
            ) from None
        return LoadedImages(found=found)

    async def _load(
        self, url: str, settings: ImageSettings, client: str, on_bytes: Callable[[int], None]
    ) -> Found:
        fetched = b""
        try:
            if url[:5].lower() == "data:":
                read = partial(data_url_bytes, url, self._limits.max_bytes)
            elif url[:8].lower().startswith(("http://", "https://")):
                fetched = await self._fetch(url, on_bytes)
                read = partial(bytes, fetched)
            else:
                raise InputError.about(
                    "image", f"is {shown(url)}, which is no address; give a data URL, or one of http(s)."
                )
            image = await self._turns.run(
                client, lambda: self._process.patches(read(), settings, self._limits)
            )
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
                f"is at {shown(url)}, and this server fetches none; send the image itself, as a data URL.",
                code="unsupported_value",
            )
        return await self._remote.fetch(url, on_bytes)


NO_IMAGES = LoadedImages(refusal="this model reads text only; leave it out.")


def _is_image(part: object) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _FORMS


def _check_part(part: Mapping[str, Any], where: str) -> None:
    """Refuse an image part that is not of one of the known forms."""
    form = _FORMS[part["type"]]
    _check_names(part, form.names, where)
    if isinstance(inner := part.get(form.names[1]), dict):
        _check_names(inner, form.inner_names, f"{where}.{form.names[1]}")
    if image_url(part) is None:
        raise invalid(f"{where} is no image part; give it as {form.example}.", where)
    detail = image_detail(part)
    if detail is not None and (not isinstance(detail, str) or detail not in DETAILS):
        raise invalid(
            f"{where} has the detail {shown(detail)}; give {', '.join(DETAILS)}, or leave it out.", where
        )


def _check_names(entries: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name, value in entries.items():
        if name not in known and value is not None:
            path = f"{where}.{name[:60]}"
            raise invalid(f"unknown field '{path}'{suggestion(name[:60], known)}", path, "unknown_parameter")
