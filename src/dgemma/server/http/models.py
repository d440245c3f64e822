"""GET /v1/models: the model, and each adapter under its name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dgemma.server.defaults import SAMPLING, THINKING
from dgemma.server.protocol import GenerationFields, ResponseModel
from dgemma.server.serving import unknown_model
from dgemma.server.state import ServerState
from dgemma.server.validation import NEUTRAL

MODELS_PATH = "/v1/models"
_NOT_SAMPLING = ("model", "stream", "stream_options", *NEUTRAL)
_SAMPLING = [name for name in GenerationFields.model_fields if name not in _NOT_SAMPLING]


class ModelPricing(ResponseModel):
    prompt: str
    completion: str


class ModelCard(ResponseModel):
    """OpenAI's fields first, then those of Mercury's client."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="The base model of an adapter, or the model itself.")
    name: str
    context_length: int
    max_output_length: int
    input_modalities: list[str]
    output_modalities: list[str]
    supported_endpoints: list[str]
    supported_features: list[str]
    supported_sampling_parameters: list[str]
    default_parameters: dict[str, float | int | str | bool | None] = Field(
        description="Of requests that say nothing of them: the checkpoint's and --default."
    )
    pricing: ModelPricing
    canvas_length: int


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


def list_models(state: ServerState) -> ModelList:
    names = (state.settings.served_model_name, *state.engine.model.adapters)
    return ModelList(object="list", data=[_describe(state, name) for name in names])


def show_model(state: ServerState, name: str) -> ModelCard:
    known = (state.settings.served_model_name, *state.engine.model.adapters)
    if name not in known:
        raise unknown_model(name, known)
    return _describe(state, name)


def _describe(state: ServerState, name: str) -> ModelCard:
    served = state.served
    return ModelCard(
        id=name,
        object="model",
        created=state.began_at,
        owned_by="dgemma",
        root=state.settings.served_model_name,
        name=name,
        context_length=served.max_positions,
        max_output_length=served.max_new_tokens(1),
        input_modalities=["text"] if served.image_settings is None else ["text", "image"],
        output_modalities=["text"],
        supported_endpoints=[
            "chat.completions",
            "responses",
            "messages",
            "completions",
            "fim.completions",
            "edit.completions",
            "decisions",
            "infill",
        ],
        supported_features=[
            "streaming",
            "tools",
            "json_mode",
            "structured_outputs",
            "reasoning",
            "logprobs",
            "diffusing",
        ],
        supported_sampling_parameters=_SAMPLING,
        default_parameters={
            **{name: getattr(served.defaults, name) for name in SAMPLING if name != "preset"},
            THINKING: state.defaults.thinking,
        },
        pricing=ModelPricing(prompt="0", completion="0"),
        canvas_length=served.canvas_len,
    )
