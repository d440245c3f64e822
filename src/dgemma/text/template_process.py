"""The caller's side of `template_worker.py`: one process, started when needed and again after its end."""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dgemma.text.template_protocol import MAX_CPU_SECONDS, ReplyKind, decode
from dgemma.worker_process import AskedWorker, end_reason

# By the clock, long enough for a busy machine. The worker limits its processor time itself, not on Windows.
MAX_SECONDS = 30.0


@dataclass(frozen=True)
class TemplateReply:
    kind: ReplyKind
    text: str  # what was rendered, or what went wrong


class TemplateProcess(AskedWorker):
    """Asks the worker. Safe to use from several threads; they take turns."""

    def __init__(self) -> None:
        super().__init__("dgemma.text.template_worker", "renders chat templates", max_seconds=MAX_SECONDS)

    def ask(self, source: str, names: tuple[str, ...], variables: Mapping[str, Any] | None) -> TemplateReply:
        """Render a template with variables; without them, compile it: see `template_worker`."""
        request = pickle.dumps((source, names, variables))
        # After a limit the worker's memory may be in pieces.
        reply = self.exchange(request, is_last=lambda reply: ReplyKind(reply[:1]) is ReplyKind.LIMIT)
        if isinstance(reply, int):
            return TemplateReply(ReplyKind.LIMIT, end_reason(reply, MAX_CPU_SECONDS))
        return TemplateReply(ReplyKind(reply[:1]), decode(reply[1:]))


TEMPLATES = TemplateProcess()
atexit.register(TEMPLATES.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TEMPLATES.forget)
