"""POST /v1/fim/completions: Mercury's name for a completion with a suffix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.asked import Form
from dgemma.server.completion_writer import CompletionWriter
from dgemma.server.completions import plan_completion
from dgemma.server.fim_request import read_fim_request
from dgemma.server.plan import Plan, Planner
from dgemma.server.work import AnyWorkPlan

PATH = "/v1/fim/completions"


def _plan(planner: Planner, body: Mapping[str, Any]) -> Plan | AnyWorkPlan:
    return plan_completion(planner, read_fim_request(body))


FIM = Form(plan=_plan, writer=CompletionWriter, prompt_fields=("prompt", "suffix"))
