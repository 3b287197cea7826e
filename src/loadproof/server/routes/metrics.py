"""``GET /metrics``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loadproof.server.routes.documented import errors
from loadproof.server.state import state_of

router = APIRouter()


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors(500)},
    summary="Metrics for Prometheus",
)
async def get_metrics(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus' text format."""
    state = state_of(request)
    stats = await state.engine.call(lambda engine: engine.stats())
    body, content_type = state.metrics.exposition(stats)
    return Response(body, media_type=content_type)
