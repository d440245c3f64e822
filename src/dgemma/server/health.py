"""GET /health, /ready and /metrics: for those who watch."""

from __future__ import annotations

from dgemma.server.api_error import ApiError, draining
from dgemma.server.replies import Status
from dgemma.server.state import ServerState

HEALTH_PATH, READY_PATH, METRICS_PATH = "/health", "/ready", "/metrics"


def health(state: ServerState) -> Status:
    """Alive: restarting it would not help. A draining server is alive."""
    failure = state.engine.stats().failure
    if failure is not None:
        raise ApiError(
            "the engine works no more; restart the server.",
            status=503,
            kind="server_error",
            code="engine_down",
        )
    return Status(status="ok")


def ready(state: ServerState) -> Status:
    """Ready: send it requests."""
    if state.admission.is_draining:
        raise draining()
    health(state)
    return Status(status="ready")


def metrics(state: ServerState) -> str:
    return state.metrics.render(state.engine.stats(), num_inside=state.admission.num_inside)
