"""Pydantic models that the endpoint families share: request fields, and the common parts of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from dgemma.engine.request import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES
from dgemma.params import DECODES, MAX_STEPS, MAX_STOP_STRING_LEN, MAX_STOP_STRINGS, MAX_TOP_K, PRESETS

# Requests

# Upper bound of integers without a rule of their own: the one of `GenerationParams`.
MAX_INT = 1 << 62
MAX_END_TOKENS = 64
# Upper bound of real numbers without a rule of their own: larger values make no difference.
MAX_REAL = 1e9

_NEUTRAL = "Checked for its type, without effect."
_NULL = {"type": "null"}
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_LEN}
# Checked where it is used, with a better message than a union of types gives.
StopField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_STRING,
                {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
                _NULL,
            ]
        }
    ),
]


def _is_canvas_len(value: Any) -> Any:
    is_length = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_length and value not in (None, "auto"):
        raise PydanticCustomError("canvas_len", 'must be a whole number of at least 1, or "auto"')
    return value


CanvasLenField = Annotated[
    Any,
    AfterValidator(_is_canvas_len),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}, _NULL]}),
]
LogitBiasField = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]],
    Field(max_length=MAX_LOGIT_BIASES),
]
_Preset = Annotated[str, WithJsonSchema({"type": "string", "enum": list(PRESETS)})]
_Decode = Annotated[str, WithJsonSchema({"type": "string", "enum": list(DECODES)})]
_Acceptance = Annotated[
    str, WithJsonSchema({"type": "string", "enum": ["entropy_bound", "confidence", "fixed"]})
]


def _is_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("only_false", "Input should be false")
    return value


# A literal False would take 0 too.
OnlyFalse = Annotated[bool, AfterValidator(_is_false), WithJsonSchema({"const": False})]


class RequestModel(BaseModel):
    """Strict: no unknown field, no number in a string, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="End with a chunk that has the usage.")
    include_obfuscation: OnlyFalse | None = None


class CommonFields(RequestModel):
    """Fields of every request to the model."""

    model: str = Field(max_length=200)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 64) - 1, description="Answer i uses seed + i.")
    deadline_s: float | None = Field(
        None,
        ge=0,
        le=MAX_REAL,
        description="Seconds from the arrival of the request, time in the queue included.",
    )

    trace: bool | None = Field(None, description="Also return every step, if the server has --traces.")
    user: str | None = Field(None, description=_NEUTRAL)
    metadata: dict[str, str] | None = Field(None, description=_NEUTRAL)
    safety_identifier: str | None = Field(None, description=_NEUTRAL)
    prompt_cache_key: str | None = Field(None, description=_NEUTRAL)


class SamplingFields(CommonFields):
    """Sampling options. dgemma's own have the names of `GenerationParams`."""

    temperature: float | None = Field(
        None, ge=0, le=100, description="Scales the schedule: 1 is the checkpoint's own, 0 takes the argmax."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Sample among the top tokens of this mass.")
    top_k: int | None = Field(None, ge=1, le=MAX_TOP_K, description="Sample among so many top tokens.")

    preset: _Preset | None = Field(None, description="A set of options; those that are given override it.")
    acceptance: _Acceptance | None = Field(None, description="Which positions of a canvas keep their token.")
    canvas_len: CanvasLenField | None = Field(None, description="Tokens of a canvas, if fewer.")
    max_denoising_steps: int | None = Field(None, ge=1, le=MAX_STEPS, description="Of one canvas.")
    t_min: float | None = Field(None, ge=0, le=100)
    t_max: float | None = Field(None, ge=0, le=100)
    entropy_bound: float | None = Field(None, ge=0, le=MAX_REAL)
    min_confidence: float | None = Field(None, ge=0, le=1)
    accept_per_step: int | None = Field(None, ge=1, le=MAX_INT)
    stability_threshold: int | None = Field(None, ge=0, le=MAX_INT)
    confidence_threshold: float | None = Field(None, ge=0, le=MAX_REAL)


class ReplyFields(SamplingFields):
    """Options of a generated text, whichever endpoint it is asked of."""

    stream: bool | None = Field(None, description="Server-sent events in place of one answer.")
    diffusing: bool | None = Field(None, description="With stream: also send drafts of the running canvas.")
    logit_bias: LogitBiasField | None = Field(None, description="What is added to the logits of token ids.")
    decode: _Decode | None = Field(None, description="Canvas by canvas, checked or not; or left to right.")
    draft_steps: int | None = Field(None, ge=1, le=MAX_STEPS, description="Of a canvas that is checked.")
    verify_threshold: float | None = Field(
        None, ge=0, le=1, description="With decode verified: the least causal probability that is kept."
    )
    end_tokens: list[Annotated[int, Field(ge=0, le=MAX_INT)]] | None = Field(
        None, max_length=MAX_END_TOKENS, description="Tokens that end an answer, in place of the model's."
    )
    ignore_end: bool | None = Field(None, description="Write up to max_tokens, whatever ends an answer.")

    @property
    def answers_per_prompt(self) -> int:
        return 1

    @property
    def ends_with_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for the usage."""
        return False


class GenerationFields(ReplyFields):
    """Options of a chat completion or a completion."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_INT, description="Answers per prompt.")
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_INT, description="Of one answer; default: 1024, or the rest of the context."
    )
    stop: StopField = Field(None, description="Texts that end an answer and are not part of it.")

    @property
    def answers_per_prompt(self) -> int:
        return self.n or 1

    @property
    def ends_with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


# Responses

FinishReasonName = Literal["stop", "length", "tool_calls"]


class ResponseModel(BaseModel):
    """A response is written with the fields that were set: an absent field differs from null."""

    model_config = ConfigDict(extra="forbid")

    @property
    def event_name(self) -> str | None:
        """The name of the server-sent event that it is, in streams that name their events."""
        return None

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class TracedResponse(ResponseModel):
    """A whole response, to which the trace of its request may be added."""

    trace: list[dict[str, Any]] | None = None  # the lines of a trace file, if the request asked for them


class TraceChunk(ResponseModel):
    """One line of the trace, in a stream."""

    object: Literal["dgemma.trace"] = "dgemma.trace"
    choices: list[Any] = Field(max_length=0, description="None: clients look for some in every chunk.")
    trace: dict[str, Any]


class PromptTokensDetails(ResponseModel):
    cached_tokens: int = Field(description="Tokens of the prompt found in the prefix cache.")


class InputTokensDetails(ResponseModel):
    cached_tokens: int = Field(description="Tokens of the prompt found in the prefix cache.")
    cache_write_tokens: int = Field(description="Always 0: nobody pays for the prefix cache.")


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int = Field(
        description="Of the thought's text, encoded once more; decisions have none."
    )


class UsageInfo(ResponseModel):
    prompt_tokens: int = Field(description="Each prompt counts once, however many answers it has.")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    denoising_steps: int = Field(description="Denoise forwards of all answers.")
    canvases: int
    tokens_per_forward: float


class UnreadToolCall(ResponseModel):
    name: str
    error: str


class AnswerDetails(ResponseModel):
    """How an answer was generated."""

    seed: int
    decode: str
    finish_reason: Literal["stop", "length", "deadline"]
    steps: list[int] = Field(description="Denoise forwards per canvas.")
    tokens_per_forward: float
    stop_string: str | None = None
    pinned: list[tuple[int, int]] = Field(
        default_factory=list, description="Spans [begin, end] of its tokens that were fixed."
    )
    provisional_tokens: int = Field(
        0, description="At the end: unsettled tokens of a canvas that the deadline cut short."
    )
    unread_tool_calls: list[UnreadToolCall] = Field(
        default_factory=list, description="Calls that cannot be parsed, or name a tool that was not offered."
    )


class DraftInfo(ResponseModel):
    """The running canvas after one step; none of it is final."""

    canvas: int
    step: int
    text: str
    entropy: float = Field(description="Mean entropy of its tokens, in nats.")


class ErrorInfo(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorInfo


def set_fields(**fields: Any) -> dict[str, Any]:
    """The fields with a value; the others are left out of a response."""
    return {name: value for name, value in fields.items() if value}
