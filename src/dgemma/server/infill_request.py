"""What POST /infill takes: the fields of llama.cpp's server that its editor plugins send.

Of its many other options, those that change nothing at their usual value are taken at that value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dgemma.constraint.forms import Json, schema_text
from dgemma.errors import InputError
from dgemma.params import MAX_TOP_K
from dgemma.server.api_error import refused
from dgemma.server.fields import UNSUPPORTED_IN_INFILL
from dgemma.server.request_fields import MAX_INT, MAX_REAL, SamplingFields, Stop, read_fields

MAX_EXTRA = 1024
MAX_RESPONSE_FIELDS = 256
# llama.cpp's way to say "any".
_ANY = -1

_Milliseconds = Annotated[float, Field(ge=0, le=MAX_REAL)]


class ExtraText(BaseModel):
    """A piece of another file. Plugins add notes of their own to it, such as its time."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    text: str
    filename: str | None = None


class InfillRequest(SamplingFields):
    model: str = Field("", max_length=200, description="Empty, as plugins send it: the model itself.")
    input_prefix: str | None = Field(
        None, description="The text before the gap.", examples=["def add(a, b):\n"]
    )
    input_suffix: str | None = Field(
        None, description="The text behind the gap.", examples=["\n\nprint(add(1, 2))\n"]
    )
    input_extra: list[ExtraText] | None = Field(
        None, max_length=MAX_EXTRA, description="Other texts to know of; they stand before the prefix."
    )
    prompt: str | None = Field(
        None, description="What was typed behind the prefix.", examples=["    return "]
    )
    n_predict: int | None = Field(
        None, ge=_ANY, le=MAX_INT, description="Most tokens; 0: only read the texts, for requests to come."
    )
    stop: Stop = None
    stream: bool | None = None
    response_fields: list[str] | None = Field(
        None,
        max_length=MAX_RESPONSE_FIELDS,
        description="The only entries to tell; a/b is b of the object a.",
    )
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 64) - 1, description="-1: drawn.")
    top_k: int | None = Field(None, ge=_ANY, le=MAX_TOP_K, description="0 or -1: no cutoff.")
    json_schema: dict[str, Any] | None = Field(None, description="The gap is JSON that this describes.")

    # Checked for their type, and without effect: they speak of llama.cpp's own machinery.
    cache_prompt: bool | None = None
    id_slot: int | None = Field(None, ge=_ANY, le=MAX_INT)
    n_indent: int | None = Field(None, ge=0, le=MAX_INT)
    samplers: str | list[str] | None = Field(None, max_length=64)
    t_max_predict_ms: _Milliseconds | None = None
    t_max_prompt_ms: _Milliseconds | None = None

    @property
    def before(self) -> str:
        """All that stands before the gap."""
        extra = "".join(_shown(text) for text in self.input_extra or ())
        return f"{extra}{self.input_prefix or ''}{self.prompt or ''}"

    @property
    def behind(self) -> str:
        return self.input_suffix or ""

    @property
    def form(self) -> Json | None:
        try:
            return Json(schema_text(self.json_schema)) if self.json_schema else None
        except InputError as error:
            raise refused(str(error), "json_schema") from None

    @property
    def limit(self) -> int | None:
        return None if self.n_predict == _ANY else self.n_predict


def read_infill_request(body: Mapping[str, Any]) -> InfillRequest:
    request = read_fields(InfillRequest, body, UNSUPPORTED_IN_INFILL)
    unset: dict[str, None] = {}
    if request.top_k is not None and request.top_k <= 0:
        unset["top_k"] = None
    if request.seed == _ANY:
        unset["seed"] = None
    return request.model_copy(update=unset) if unset else request


def _shown(extra: ExtraText) -> str:
    name = f"{extra.filename}\n" if extra.filename else ""
    return f"{name}{extra.text.rstrip()}\n\n"
