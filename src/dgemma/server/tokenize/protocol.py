"""Requests and responses of POST /tokenize and POST /detokenize, as vLLM and llama.cpp spell them.

`prompt`, `messages` and their options are vLLM's names, `content` and `add_special` are llama.cpp's. A
response has the entries of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from dgemma.server.chat.protocol import ChatTemplateKwargs, MessageField, ToolField, check_tools
from dgemma.server.http.errors import invalid
from dgemma.server.protocol import MAX_INT, RequestModel, ResponseModel
from dgemma.server.validation import Unsupported, read_fields

UNSUPPORTED_WITH_PROMPT: dict[str, Unsupported] = {}
UNSUPPORTED_WITH_CONTENT: dict[str, Unsupported] = {
    "parse_special": Unsupported("a text never becomes control tokens", (False,)),
    "with_pieces": Unsupported("return_token_strs gives the texts of the tokens", (False,)),
}
UNSUPPORTED_WITH_MESSAGES: dict[str, Unsupported] = {
    "add_generation_prompt": Unsupported("a chat is encoded for the reply to it", (True,)),
    "add_special_tokens": Unsupported("the chat template writes them", (False,)),
    "chat_template": Unsupported("the checkpoint's template is used"),
    "continue_final_message": Unsupported("a chat is encoded for the reply to it", (False,)),
    "media_io_kwargs": Unsupported("this model reads text only"),
    "mm_processor_kwargs": Unsupported("this model reads text only"),
}
UNSUPPORTED_IN_DETOKENIZE: dict[str, Unsupported] = {}


class OptionalModel(RequestModel):
    """The tokens of all served models are the same."""

    model: str = Field("", max_length=200, description="Absent or empty: the model itself.")


class TokenizeFields(OptionalModel):
    return_token_strs: bool | None = Field(None, description="Return the text of each token too.")


class TokenizePromptRequest(TokenizeFields):
    """A text, as vLLM takes it."""

    prompt: str = Field(examples=["Once upon a time"])
    add_special_tokens: bool | None = Field(
        None,
        description="Begin with the token that begins a text (`<bos>`), as completions do; default: true.",
    )

    @property
    def text(self) -> str:
        return self.prompt

    @property
    def has_bos(self) -> bool:
        return self.add_special_tokens is not False


class TokenizeContentRequest(TokenizeFields):
    """A text, as llama.cpp takes it."""

    content: str = Field(examples=["Once upon a time"])
    add_special: bool | None = Field(
        None, description="Begin with the token that begins a text (`<bos>`); default: false."
    )

    @property
    def text(self) -> str:
        return self.content

    @property
    def has_bos(self) -> bool:
        return self.add_special is True


class TokenizeChatRequest(TokenizeFields):
    """A chat, encoded as for a chat completion."""

    messages: list[MessageField] = Field(min_length=1, examples=[[{"role": "user", "content": "Hello"}]])
    tools: list[ToolField] | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None

    @property
    def thinking(self) -> bool | None:
        """None: the request does not say."""
        return None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking


class DetokenizeRequest(OptionalModel):
    tokens: list[Annotated[int, Field(ge=0, le=MAX_INT)]] = Field(examples=[[1, 2, 3]])


TokenizeRequest = TokenizePromptRequest | TokenizeContentRequest | TokenizeChatRequest
_KINDS: dict[str, tuple[type[TokenizeRequest], Mapping[str, Unsupported]]] = {
    "prompt": (TokenizePromptRequest, UNSUPPORTED_WITH_PROMPT),
    "content": (TokenizeContentRequest, UNSUPPORTED_WITH_CONTENT),
    "messages": (TokenizeChatRequest, UNSUPPORTED_WITH_MESSAGES),
}


def read_tokenize_request(body: Mapping[str, Any]) -> TokenizeRequest:
    given = [name for name in _KINDS if name in body]
    if len(given) > 1:
        raise invalid(f"{given[1]} is given and so is {given[0]}; give one of them.", given[1])
    if not given:
        raise invalid(
            "prompt is missing; give it, or content or messages.", "prompt", "missing_required_parameter"
        )
    kind, unsupported = _KINDS[given[0]]
    request: TokenizeRequest = read_fields(kind, body, unsupported)
    if isinstance(request, TokenizeChatRequest):
        check_tools(request.tools or ())
    return request


def read_detokenize_request(body: Mapping[str, Any]) -> DetokenizeRequest:
    return read_fields(DetokenizeRequest, body, UNSUPPORTED_IN_DETOKENIZE)


# Responses


class TokenizeResponse(ResponseModel):
    tokens: list[int]
    count: int
    max_model_len: int = Field(description="Most tokens of prompt and answer.")
    token_strs: list[str] | None = Field(None, description="With return_token_strs: the text of each token.")


class DetokenizeResponse(ResponseModel):
    prompt: str = Field(description="The text; control tokens are shown by name.")
    content: str = Field(description="The same, under llama.cpp's name.")
