"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.asked import Form
from dgemma.server.chat_request import read_chat_request
from dgemma.server.chat_writer import ChatWriter
from dgemma.server.plan import Plan, Planner

PATH = "/v1/chat/completions"


def _plan(planner: Planner, body: Mapping[str, Any]) -> Plan:
    return planner.plan_chat(read_chat_request(body))


CHAT = Form(plan=_plan, writer=ChatWriter, prompt_fields=("messages",))
