"""GET /health, /ready and /metrics: for monitoring."""

from __future__ import annotations

from dgemma.server.http.errors import engine_down, engine_stalled, server_draining
from dgemma.server.protocol import ResponseModel
from dgemma.server.state import ServerState

HEALTH_PATH, READY_PATH, METRICS_PATH = "/health", "/ready", "/metrics"


class StatusResponse(ResponseModel):
    status: str


def health(state: ServerState) -> StatusResponse:
    """200 while a restart would not help. A draining server is healthy."""
    stats = state.engine.stats()
    if stats.failure is not None:
        raise engine_down()
    if stats.is_stalled:
        raise engine_stalled()
    return StatusResponse(status="ok")


def ready(state: ServerState) -> StatusResponse:
    """200 while new requests are admitted."""
    if state.admission.is_draining:
        raise server_draining()
    health(state)
    return StatusResponse(status="ready")


async def metrics(state: ServerState) -> str:
    return state.metrics.render(await state.engine.fresh_stats(), num_active=state.admission.num_active)
