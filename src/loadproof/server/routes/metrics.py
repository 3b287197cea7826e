"""``GET /metrics``."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loadproof.engine.engine import Engine
from loadproof.server.errors import ApiError
from loadproof.server.metrics import CONTENT_TYPE
from loadproof.server.routes.documented import errors
from loadproof.server.state import state_of

router = APIRouter()

# Half of what Prometheus waits for an answer unless told otherwise.
STATS_TIMEOUT = 5.0


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors()},
    summary="Metrics for Prometheus",
)
async def get_metrics(request: Request) -> Response:
    """All in Prometheus' text format; of an engine that doesn't answer, what was known last."""
    state = state_of(request)
    stats = None
    with suppress(TimeoutError, ApiError):
        stats = await state.engine.call(Engine.stats, STATS_TIMEOUT)
    state.metrics.update(stats, alive=state.engine.alive)
    return Response(state.metrics.exposition(), media_type=CONTENT_TYPE)
