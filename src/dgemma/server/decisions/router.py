"""The routes of decisions: one for both shapes, and Mercury's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.decisions.protocol import (
    UNSUPPORTED_IN_DECISIONS,
    DecisionRequest,
    DecisionResponse,
    NamedDecisionResponse,
    StateRequest,
    read_decision_request,
    read_state_request,
)
from dgemma.server.decisions.serving import DecisionServing
from dgemma.server.http.errors import invalid
from dgemma.server.pipeline import Endpoint
from dgemma.server.plan import AnyServingPlan
from dgemma.server.serving import ServingContext


def create_decision(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    """Either shape: `input` is OpenAI's, `state` Mercury's."""
    if {"state", "input"} <= body.keys():
        raise invalid("state is given and so is input; give one of them.", "state")
    if "state" in body:
        return create_named_decision(context, body)
    if "input" not in body:
        raise invalid("input is missing; give it, or state.", "input", "missing_required_parameter")
    return DecisionServing(context).create_decision(read_decision_request(body))


def create_named_decision(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    return DecisionServing(context).create_named_decision(read_state_request(body))


DECISIONS = Endpoint(
    path="/v1/decisions",
    summary="Answer questions with probabilities",
    create=create_decision,
    prompt_fields=("input", "state"),
    requests={DecisionRequest: UNSUPPORTED_IN_DECISIONS, StateRequest: UNSUPPORTED_IN_DECISIONS},
    responses=(DecisionResponse, NamedDecisionResponse),
    example={
        "input": "The parcel came late.",
        "questions": [{"type": "predicate", "instructions": "Is the customer unhappy?"}],
    },
)
SYSTEM_ONE = Endpoint(
    path="/v1/systemone",
    summary="The same of a state",
    create=create_named_decision,
    prompt_fields=("state",),
    requests={StateRequest: UNSUPPORTED_IN_DECISIONS},
    responses=(NamedDecisionResponse,),
    example={
        "state": "The parcel came late.",
        "questions": {"unhappy": {"type": "noul", "instructions": "Is the customer unhappy?"}},
    },
)
