"""What the server answers to /infill, edits and decisions, as types: the fields of the clients there are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dgemma.server.replies import Reply, Usage

# llama.cpp's


class InfillTimings(Reply):
    prompt_n: int = Field(description="Tokens that were read, those of the cache left out.")
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillSettings(Reply):
    n_predict: int
    seed: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: list[str]


class Infill(Reply):
    """Whole, or the last chunk of a stream."""

    content: str
    stop: bool
    index: int
    id_slot: int
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool = Field(description="Of the text before the gap, the beginning did not fit.")
    stop_type: str
    stopping_word: str
    timings: InfillTimings
    generation_settings: InfillSettings


class InfillChunk(Reply):
    content: str
    stop: bool


class InfillParts(Reply):
    """With response_fields: these entries, those of inner objects under their paths."""

    model_config = ConfigDict(extra="allow")


# Mercury's edits


class EditChange(Reply):
    """Characters `start` to `stop` of the old region, and what stands there now."""

    start: int
    stop: int
    old: str
    new: str
    gain: float = Field(description="Nats by which the text is likelier, less what the change costs.")


class EditDetails(Reply):
    """How a region was rewritten."""

    seed: int
    finish_reason: Literal["stop", "deadline"]
    changes: list[EditChange]
    looked_at: int = Field(description="Places where the model would rather have read something else.")
    denoising_steps: int


class EditMessage(Reply):
    role: Literal["assistant"]
    content: str


class EditChoice(Reply):
    index: int
    message: EditMessage
    finish_reason: Literal["stop", "length"]
    dgemma: EditDetails


class EditCompletion(Reply):
    id: str
    object: Literal["edit.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[EditChoice]
    usage: Usage


# OpenAI's decisions


class PredicateAnswer(Reply):
    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(Reply):
    value: str | bool
    probability: float


class ChoiceAnswer(Reply):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float = Field(description="The probability of the choice.")
    probabilities: list[ChoiceProbability]


class LevelProbability(Reply):
    value: int = Field(description="The number of the level, the lowest being 0.")
    label: str
    probability: float


class ScoreAnswer(Reply):
    type: Literal["score"]
    name: str | None
    score: float = Field(description="The mean level.")
    confidence: float
    probabilities: list[LevelProbability]


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class DecisionUsage(Reply):
    input_tokens: int = Field(description="Of the input and all questions.")
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Always 0: probabilities are read, nothing is written.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Decision(Reply):
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    model: str
    usage: DecisionUsage


# Mercury's decisions


class NoulAnswer(Reply):
    type: Literal["noul"]
    noul: float


class NamedChoiceAnswer(Reply):
    type: Literal["choice"]
    choice: str
    confidence: float
    probabilities: dict[str, float]


class NamedScoreAnswer(Reply):
    type: Literal["score"]
    score: float
    confidence: float
    legend: dict[str, Any] = Field(description="The criterion of each level.")
    probabilities: dict[str, float]


class NamedDecisionUsage(Reply):
    input_tokens: int
    output_tokens: int


class NamedDecision(Reply):
    answers: dict[str, NoulAnswer | NamedChoiceAnswer | NamedScoreAnswer]
    model: str
    usage: NamedDecisionUsage


WORK_REPLIES: tuple[type[BaseModel], ...] = (
    Infill, InfillChunk, InfillParts, EditCompletion, Decision, NamedDecision,
)  # fmt: skip
