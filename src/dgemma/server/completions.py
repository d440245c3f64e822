"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.asked import Form
from dgemma.server.completion_request import CompletionRequest, read_completion_request
from dgemma.server.completion_writer import CompletionWriter
from dgemma.server.fill import plan_fill
from dgemma.server.plan import Plan, Planner
from dgemma.server.work import AnyWorkPlan

PATH = "/v1/completions"


def plan_completion(planner: Planner, request: CompletionRequest) -> Plan | AnyWorkPlan:
    """A text with something behind it has a gap; one without is continued."""
    return plan_fill(planner, request) if request.suffix else planner.plan_completion(request)


def _plan(planner: Planner, body: Mapping[str, Any]) -> Plan | AnyWorkPlan:
    return plan_completion(planner, read_completion_request(body))


COMPLETIONS = Form(plan=_plan, writer=CompletionWriter, prompt_fields=("prompt", "suffix"))
