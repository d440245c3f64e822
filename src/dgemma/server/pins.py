"""The request fields that give a part of the answer: pins, a starting canvas, and vLLM's names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from dgemma.engine.request import PinnedTokens
from dgemma.errors import InputError, suggestion
from dgemma.server.http.errors import ApiError, invalid, shown
from dgemma.server.protocol import GenerationFields, ReplyFields
from dgemma.server.text import TextService
from dgemma.tasks.pins import MAX_PINS, MAX_SPANS, pinned_tokens

# dgemma.tasks.pins checks them; these schemas only describe what it accepts.
_ID = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_AT = {**_ID, "description": "The position of its first token, in tokens of the answer, from 0."}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    """A closed object; null means absent."""
    nullable = {name: {"anyOf": [entry, {"type": "null"}]} for name, entry in properties.items()}
    return {
        "type": "object",
        "properties": {**nullable, **{name: properties[name] for name in required}},
        "required": required,
        "additionalProperties": False,
    }


PinField = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "anyOf": [
                _object(["at", "text"], at=_AT, text=_TEXT),
                _object(["at", "token_ids"], at=_AT, token_ids=_IDS),
                _object(
                    ["at", "any_of"],
                    at=_AT,
                    any_of={"type": "array", "items": {"anyOf": [_TEXT, _ID]}, "minItems": 1},
                ),
            ]
        }
    ),
]
_SPANS = {
    "type": "array",
    "items": {"type": "array", "items": _ID, "minItems": 2, "maxItems": 2},
    "maxItems": MAX_SPANS,
    "description": "[begin, end] of what stays: in characters of text, or in token_ids.",
}
CanvasField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _object(["text"], text=_TEXT, read_only=_SPANS),
                _object(["token_ids"], token_ids=_IDS, read_only=_SPANS),
                {"type": "null"},
            ]
        }
    ),
]
_SEED, _PINNED = "diffusion_seed_canvas", "diffusion_pinned"
VllmArguments = Annotated[
    dict[str, Any],
    WithJsonSchema(_object([], **{_SEED: _IDS, _PINNED: {"type": "array", "items": _ID}})),
]
# Of vLLM's names, those whose meaning is not that of anything here.
_OTHER_MEANING = {
    "diffusion_max_steps": "it may end a schedule early, where max_denoising_steps sets its length. "
    "Give max_denoising_steps",
    "diffusion_read_only": "an answer is returned when its canvas has settled. /v1/decisions reads "
    "probabilities after one step",
    "diffusion_canvas_length": "the canvas of a request has a field of its own. Give canvas_len",
    "diffusion_constrained": "constraints are response formats. Give regex, choice or json_schema",
}


class PinFields(GenerationFields):
    """What of the answer is given."""

    pins: list[PinField] | None = Field(
        None, max_length=MAX_PINS, description="Tokens of the answer that are fixed, or limited to a few."
    )
    canvas: CanvasField = Field(
        None, description="A text or token ids that the canvases start from, in place of noise."
    )
    vllm_xargs: VllmArguments | None = Field(
        None, description="vLLM's names: diffusion_seed_canvas and diffusion_pinned."
    )


def requested_pins(request: ReplyFields, text: TextService, canvas_len: int) -> PinnedTokens | None:
    """What is pinned of each answer of a request; None: nothing."""
    if not isinstance(request, PinFields):
        return None
    canvas = request.canvas
    if request.vllm_xargs is not None:
        if canvas is not None:
            raise invalid("canvas and vllm_xargs both give a canvas; give one of them.", "vllm_xargs")
        canvas = _vllm_canvas(request.vllm_xargs, canvas_len)
    try:
        return pinned_tokens(request.pins, canvas, text.encode_text, lambda id_: text.token_text(id_).raw)
    except InputError as error:
        field = error.field
        raise invalid(str(error), canvas_field(request) if field == "canvas" else field, error.code) from None


def canvas_field(request: ReplyFields) -> str:
    """The field that a refusal of the canvas is about."""
    return "canvas" if getattr(request, "vllm_xargs", None) is None else "vllm_xargs"


def _vllm_canvas(given: Mapping[str, Any], canvas_len: int) -> dict[str, Any] | None:
    for name in given:
        if name in _OTHER_MEANING:
            raise _unsupported(name, _OTHER_MEANING[name])
        if name not in (_SEED, _PINNED):
            raise _unsupported(name, f"it is unknown{suggestion(name[:60], (_SEED, _PINNED))}")
    seed, pinned = given.get(_SEED), given.get(_PINNED)
    if seed is None:
        if pinned:
            raise invalid(f"vllm_xargs.{_PINNED} needs {_SEED}; give it too.", "vllm_xargs")
        return None
    if not _are_ids(seed) or len(seed) != canvas_len:
        raise invalid(
            f"vllm_xargs.{_SEED} is {shown(seed)}; give {canvas_len} token ids, a whole canvas.", "vllm_xargs"
        )
    if pinned is None:
        pinned = []
    if not _are_ids(pinned) or any(position >= canvas_len for position in pinned):
        raise invalid(
            f"vllm_xargs.{_PINNED} is {shown(pinned)}; give positions from 0 to {canvas_len - 1}.",
            "vllm_xargs",
        )
    return {"token_ids": seed, "read_only": [[at, at + 1] for at in sorted(set(pinned))]}


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _unsupported(name: str, why: str) -> ApiError:
    return invalid(
        f"vllm_xargs.{name[:60]} is not supported: {why.rstrip('.')}.",
        "vllm_xargs",
        "unsupported_parameter",
    )
