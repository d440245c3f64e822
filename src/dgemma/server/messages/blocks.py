"""Content blocks of Anthropic's messages: those of a request, and those of a reply."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dgemma.server.protocol import RequestModel, ResponseModel

# A thought is sent as it is. Clients require a signature, and send it back.
SIGNATURE = "unsigned"
BlockId = Annotated[str, Field(min_length=1, max_length=200)]

# Requests


class CacheControl(RequestModel):
    """Without effect: the prefix cache keeps prompts as memory allows."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlockInput(RequestModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, max_length=0)


class Base64Source(RequestModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(RequestModel):
    type: Literal["url"]
    url: str


class ImageBlockInput(RequestModel):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: CacheControl | None = None

    @property
    def url(self) -> str:
        if isinstance(self.source, UrlSource):
            return self.source.url
        return f"data:{self.source.media_type};base64,{self.source.data}"


class DirectCaller(RequestModel):
    type: Literal["direct"]


class ToolUseBlockInput(RequestModel):
    """A call of the assistant's."""

    type: Literal["tool_use"]
    id: BlockId
    name: str = Field(min_length=1)
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


class ToolResultBlockInput(RequestModel):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: str | list[Annotated[TextBlockInput | ImageBlockInput, Field(discriminator="type")]] = ""
    is_error: bool | None = Field(None, description="Without effect: the content says what went wrong.")
    cache_control: CacheControl | None = None


class ThinkingBlockInput(RequestModel):
    """A thought, as it was sent."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Not checked.")


BlockInput = Annotated[
    TextBlockInput | ImageBlockInput | ToolUseBlockInput | ToolResultBlockInput | ThinkingBlockInput,
    Field(discriminator="type"),
]


class MessageInput(RequestModel):
    role: Literal["user", "assistant", "system"] = Field(description="A system message is at the beginning.")
    content: str | list[BlockInput]

    @property
    def blocks(self) -> list[BlockInput]:
        if isinstance(self.content, str):
            return [text_block(self.content)]
        return self.content


def text_block(text: str) -> TextBlockInput:
    return TextBlockInput.model_validate({"type": "text", "text": text})


# Replies


class TextBlock(ResponseModel):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(ResponseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="None: thoughts are not signed.")


class ToolUseBlock(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = TextBlock | ThinkingBlock | ToolUseBlock
