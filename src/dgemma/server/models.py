"""GET /v1/models: the model, and each adapter under its name."""

from __future__ import annotations

from dgemma.server.plan import unknown_model
from dgemma.server.replies import Model, ModelList, Pricing
from dgemma.server.request_fields import GenerationFields
from dgemma.server.state import ServerState

PATH = "/v1/models"
_NOT_SAMPLING = ("model", "stream", "stream_options", "user", "metadata", "safety_identifier")
_SAMPLING = [
    name for name in GenerationFields.model_fields if name not in (*_NOT_SAMPLING, "prompt_cache_key")
]


def list_models(state: ServerState) -> ModelList:
    names = (state.settings.served_model_name, *state.engine.model.adapters)
    return ModelList(object="list", data=[_describe(state, name) for name in names])


def one_model(state: ServerState, name: str) -> Model:
    known = (state.settings.served_model_name, *state.engine.model.adapters)
    if name not in known:
        raise unknown_model(name, known)
    return _describe(state, name)


def _describe(state: ServerState, name: str) -> Model:
    served = state.engine.model
    return Model(
        id=name,
        object="model",
        created=state.began_at,
        owned_by="dgemma",
        root=state.settings.served_model_name,
        name=name,
        context_length=served.max_positions,
        max_output_length=served.room_behind(1),
        input_modalities=["text"],
        output_modalities=["text"],
        supported_endpoints=[
            "chat.completions",
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
        pricing=Pricing(prompt="0", completion="0"),
        canvas_length=served.canvas_len,
    )
