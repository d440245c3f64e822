"""Requests and responses of POST /infill: the fields of llama.cpp's server that editor plugins send.

Of its many other options, those that change nothing at their usual value are accepted at that value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dgemma.errors import InputError
from dgemma.params import MAX_TOP_K
from dgemma.server.http.errors import invalid
from dgemma.server.protocol import MAX_INT, MAX_REAL, ResponseModel, SamplingFields, StopField, TracedResponse
from dgemma.server.validation import GRAMMAR, PENALTY, UNSUPPORTED_BY_ALL, Unsupported, read_fields
from dgemma.structured_output.response_format import JsonFormat, schema_text

MAX_EXTRA = 1024
MAX_RESPONSE_FIELDS = 256
# llama.cpp's value for "no limit" or "random".
_ANY = -1

UNSUPPORTED_IN_INFILL: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    "grammar": GRAMMAR,
    "lora": Unsupported("name an adapter as model", ([],)),
    "min_p": Unsupported("top_k and top_p limit the sampled tokens", (0,)),
    "n_probs": Unsupported("this endpoint has no log-probabilities", (0,)),
    "repeat_penalty": Unsupported(PENALTY.why, (1,)),
}
_Milliseconds = Annotated[float, Field(ge=0, le=MAX_REAL)]


class ExtraText(BaseModel):
    """A chunk of another file. Plugins add fields of their own, such as its time."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    text: str
    filename: str | None = None


class InfillRequest(SamplingFields):
    model: str = Field("", max_length=200, description="Empty, as plugins send it: the model itself.")
    input_prefix: str | None = Field(
        None, description="The text before the gap.", examples=["def add(a, b):\n"]
    )
    input_suffix: str | None = Field(
        None, description="The text after the gap.", examples=["\n\nprint(add(1, 2))\n"]
    )
    input_extra: list[ExtraText] | None = Field(
        None, max_length=MAX_EXTRA, description="Other texts; they stand before the prefix."
    )
    prompt: str | None = Field(None, description="What was typed after the prefix.", examples=["    return "])
    n_predict: int | None = Field(
        None, ge=_ANY, le=MAX_INT, description="Most tokens; 0: only read the texts into the prefix cache."
    )
    stop: StopField = None
    stream: bool | None = None
    response_fields: list[str] | None = Field(
        None,
        max_length=MAX_RESPONSE_FIELDS,
        description="The only entries to send; a/b is b of the object a.",
    )
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 64) - 1, description="-1: random.")
    top_k: int | None = Field(None, ge=_ANY, le=MAX_TOP_K, description="0 or -1: no cutoff.")
    json_schema: dict[str, Any] | None = Field(None, description="The gap is JSON of this schema.")

    # Checked for their type, and without effect: options of llama.cpp's own implementation.
    cache_prompt: bool | None = None
    id_slot: int | None = Field(None, ge=_ANY, le=MAX_INT)
    n_indent: int | None = Field(None, ge=0, le=MAX_INT)
    samplers: str | list[str] | None = Field(None, max_length=64)
    t_max_predict_ms: _Milliseconds | None = None
    t_max_prompt_ms: _Milliseconds | None = None

    @property
    def before(self) -> str:
        """All text before the gap."""
        extra = "".join(_extra_text(text) for text in self.input_extra or ())
        return f"{extra}{self.input_prefix or ''}{self.prompt or ''}"

    @property
    def after(self) -> str:
        return self.input_suffix or ""

    @property
    def text_format(self) -> JsonFormat | None:
        try:
            return JsonFormat(schema_text(self.json_schema)) if self.json_schema else None
        except InputError as error:
            raise invalid(str(error), "json_schema") from None

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


def _extra_text(extra: ExtraText) -> str:
    name = f"{extra.filename}\n" if extra.filename else ""
    return f"{name}{extra.text.rstrip()}\n\n"


# Responses


class InfillTimings(ResponseModel):
    prompt_n: int = Field(description="Prompt tokens that were read, without those in the prefix cache.")
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillSettings(ResponseModel):
    n_predict: int
    seed: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: list[str]


class InfillResponse(TracedResponse):
    """Whole, or the last chunk of a stream."""

    content: str
    stop: bool
    index: int
    id_slot: int
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool = Field(description="The beginning of the text before the gap did not fit.")
    stop_type: str
    stopping_word: str
    timings: InfillTimings
    generation_settings: InfillSettings


class InfillChunk(ResponseModel):
    content: str
    stop: bool


class InfillSelection(TracedResponse):
    """With response_fields: these entries, those of inner objects under their paths."""

    model_config = ConfigDict(extra="allow")
