"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.asked import Form
from dgemma.server.completion_request import read_completion_request
from dgemma.server.completion_writer import CompletionWriter
from dgemma.server.plan import Plan, Planner

PATH = "/v1/completions"


def _plan(planner: Planner, body: Mapping[str, Any]) -> Plan:
    return planner.plan_completion(read_completion_request(body))


COMPLETIONS = Form(plan=_plan, writer=CompletionWriter, prompt_field="prompt")
