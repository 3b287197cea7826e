"""The page at ``/``, and ``GET /engine``: what it shows of the engine."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loadproof.engine.engine import Engine
from loadproof.server.errors import ApiError, unavailable
from loadproof.server.routes.documented import errors
from loadproof.server.schemas.engine import EngineCounters, EngineView
from loadproof.server.state import state_of

router = APIRouter()

_PAGE = files("loadproof.server") / "page"
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# The page needs nothing but its own files and the server's answers, and nobody may frame it.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MAX_SEQUENCES = 100


@router.get("/", include_in_schema=False)
async def get_page() -> Response:
    """The page itself."""
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def get_page_file(name: str) -> Response:
    """A file that the page names."""
    return _file(name)


@router.get(
    "/engine", response_model=EngineView, responses=errors(500, 503), summary="What the engine is doing"
)
async def get_engine(request: Request) -> dict[str, Any]:
    """Blocks by state, counters, and how far each unfinished sequence has come."""
    state = state_of(request)
    try:
        seen = await state.engine.call(_view, state.config.health_timeout)
    except TimeoutError as error:
        raise unavailable("The engine does not answer.") from error
    return {
        "model": state.model_name,
        "system_fingerprint": state.llm.system_fingerprint,
        "max_model_len": state.llm.max_model_len,
        **seen,
    }


def _view(engine: Engine) -> dict[str, Any]:
    """What the engine's thread is asked for: copies, so that they can leave it."""
    stats = engine.stats()
    unfinished = sorted(engine.progress(), key=lambda one: one.status == "waiting")
    listed = unfinished[:_MAX_SEQUENCES]
    return {
        "block_size": engine.device.limits.block_size,
        "time": time.monotonic(),
        "blocks": _blocks(stats),
        "num_running": stats["num_running"],
        "num_waiting": stats["num_waiting"],
        "counters": {name: stats[name] for name in EngineCounters.model_fields},
        "sequences": [asdict(sequence) for sequence in listed],
        "num_left_out": len(unfinished) - len(listed),
    }


def _blocks(stats: dict[str, int]) -> dict[str, int]:
    total, free, blank = stats["num_blocks"], stats["num_free_blocks"], stats["num_blank_blocks"]
    return {"total": total, "held": total - free, "cached": free - blank, "blank": blank}


def _file(name: str) -> Response:
    content = _contents().get(name)
    if content is None:
        raise ApiError(404, "The page has no such file.", code="not_found")
    return Response(content, media_type=_MEDIA_TYPES[name.rpartition(".")[2]], headers=_HEADERS)


@cache
def _contents() -> dict[str, bytes]:
    """All files of the page by name; no other can be asked for."""
    return {
        entry.name: entry.read_bytes()
        for entry in _PAGE.iterdir()
        if entry.name.rpartition(".")[2] in _MEDIA_TYPES
    }
