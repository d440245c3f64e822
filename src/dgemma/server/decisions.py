"""POST /v1/decisions: questions with given answers, in OpenAI's shape or in Mercury's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dgemma.canvas.calibration import Calibration
from dgemma.canvas.decide import Decided, Question, decide
from dgemma.canvas.rounds import Rounds
from dgemma.canvas.workbench import Workbench
from dgemma.errors import InputError
from dgemma.server.api_error import ApiError, refused
from dgemma.server.asked import Form
from dgemma.server.conversation import messages_of
from dgemma.server.decision_request import DecisionRequest, read_decision_request
from dgemma.server.decision_writer import DecisionWriter, NamedDecisionWriter
from dgemma.server.plan import Planner, new_id, too_long
from dgemma.server.request_fields import CommonFields
from dgemma.server.state_request import StateRequest, read_state_request
from dgemma.server.work import WorkPlan, WorkWriter

PATH = "/v1/decisions"
SYSTEM_ONE_PATH = "/v1/systemone"
# The same question has the same answer, unless somebody asks for another look.
_SEED = 0


def _plan(planner: Planner, body: Mapping[str, Any]) -> WorkPlan[Decided]:
    extra = body.get("extra_body")
    given = {*body, *(extra if isinstance(extra, dict) else ())}
    if {"state", "input"} <= given:
        raise refused("state is given and so is input; give one of them.", "state")
    if "state" in given:
        return _plan_state(planner, body)
    if "input" not in given:
        raise ApiError(
            "input is missing; give it, or state.", param="input", code="missing_required_parameter"
        )
    return plan_decision(planner, read_decision_request(body))


def _plan_state(planner: Planner, body: Mapping[str, Any]) -> WorkPlan[Decided]:
    return plan_named_decision(planner, read_state_request(body))


def plan_decision(planner: Planner, request: DecisionRequest) -> WorkPlan[Decided]:
    context = request.input if isinstance(request.input, str) else messages_of(request.input)
    questions = request.to_questions()
    return _planned(planner, request, context, questions, DecisionWriter(model=request.model), "input")


def plan_named_decision(planner: Planner, request: StateRequest) -> WorkPlan[Decided]:
    named = request.to_questions()
    questions = [question for question in named.values() if question is not None]
    writer = NamedDecisionWriter(request=request)
    return _planned(planner, request, request.text, questions, writer, "state")


def _planned(
    planner: Planner,
    request: CommonFields,
    context: str | Sequence[Mapping[str, Any]],
    questions: Sequence[Question],
    writer: WorkWriter[Decided],
    about: str,
) -> WorkPlan[Decided]:
    seed = _SEED if request.seed is None else request.seed
    bench = planner.workbench(request, id_=new_id("decision"), seed=seed)
    most = planner.settings.max_prompt_tokens
    rounds = _decided(bench, context, questions, planner.calibration, about=about, most_prompt_tokens=most)
    return WorkPlan(
        model=request.model,
        works=(rounds,),
        writer=writer,
        deadline_s=planner.deadline_of(bench),
        about=about,
    )


def _decided(
    bench: Workbench,
    context: str | Sequence[Mapping[str, Any]],
    questions: Sequence[Question],
    calibration: Calibration | None,
    *,
    about: str,
    most_prompt_tokens: int | None,
) -> Rounds[Decided]:
    """`decide`, but for what only a server refuses, and with the field that a refusal is about."""
    if not questions:
        return Decided(decisions=(), forwards=0, prompt_tokens=0, cached_tokens=0, seed=bench.seed)
    rounds = decide(bench, context, questions, calibration=calibration)
    try:
        requests = next(rounds)
        count = len(requests[0].prompt)
        if most_prompt_tokens is not None and count > most_prompt_tokens:
            raise too_long(
                f"{about} and questions have {count} tokens; this server takes at most {most_prompt_tokens}. "
                "Shorten them.",
                about,
            )
        while True:
            requests = rounds.send((yield requests))
    except StopIteration as end:
        decided: Decided = end.value
        return decided
    except InputError as error:
        if "this model's context" in str(error):
            raise too_long(str(error), about) from None
        raise refused(str(error), "questions" if "question" in str(error) else about) from None


DECISIONS = Form(plan=_plan, prompt_fields=("input", "state"))
SYSTEM_ONE = Form(plan=_plan_state, prompt_fields=("state",))
