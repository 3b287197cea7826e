"""The application: routes, doors and error answers around one model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from loadproof import __version__
from loadproof.server.access import AccessMiddleware, log_access, request_id_headers
from loadproof.server.async_engine import AsyncEngine
from loadproof.server.engine_log import log_engine
from loadproof.server.errors import ApiError, engine_failed, internal_error
from loadproof.server.head import HeadMiddleware
from loadproof.server.metrics import Metrics
from loadproof.server.request_record import REQUEST_ID_HEADER, RequestRecord
from loadproof.server.routes import chat, completions, metrics, models, page, scoring, tokens
from loadproof.server.security import ApiKeyMiddleware, BodyLimitMiddleware, LocalHostMiddleware, is_loopback
from loadproof.server.settings import ServerConfig
from loadproof.server.state import IGNORED_FIELDS_HEADER, ServerState
from loadproof.server.streaming import ClientGoneError
from loadproof.server.tracing import open_tracing
from loadproof.server.validation import unreadable_body, validation_error

if TYPE_CHECKING:
    from loadproof.llm import LLM
    from loadproof.server.spans import Spans

_log = logging.getLogger("loadproof.server")
_SUMMARY = "LLM serving whose answer never depends on the load."


def create_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """The application that serves ``llm``; its lifespan owns the engine's thread, and closes ``llm``."""
    measured = Metrics(config.metrics_prefix, llm)
    spans = open_tracing(config, llm)
    engine = AsyncEngine(
        llm.engine,
        max_queue=config.max_queue,
        max_stream_backlog=config.max_stream_backlog,
        observer=measured,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        log = asyncio.create_task(log_engine(engine))
        try:
            yield
        finally:
            log.cancel()
            await engine.stop()
            if spans is not None:
                await asyncio.to_thread(spans.close)

    app = FastAPI(
        title="loadproof",
        summary=_SUMMARY,
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # They would lead to whatever name the request's Host has.
        redirect_slashes=False,
    )
    app.state.server = ServerState(llm, engine, config, measured)
    for each in (completions, chat, scoring, tokens, models, metrics, page):
        app.include_router(each.router)
    _add_middlewares(app, config)
    app.add_middleware(AccessMiddleware, listeners=_listeners(config, measured, spans))
    _add_error_answers(app)
    documented = app.openapi

    def openapi() -> dict[str, Any]:
        return _without_422(documented())

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _listeners(
    config: ServerConfig, measured: Metrics, spans: Spans | None
) -> list[Callable[[RequestRecord], None]]:
    """Who hears of each request that is over."""
    listeners: list[Callable[[RequestRecord], None]] = [measured.http.finished]
    if config.access_log:
        listeners.append(log_access)
    if spans is not None:
        listeners.append(spans.finished)
    return listeners


def _add_middlewares(app: FastAPI, config: ServerConfig) -> None:
    """The one added last comes first."""
    app.add_middleware(HeadMiddleware)
    app.add_middleware(BodyLimitMiddleware, limit=config.max_body_size)
    if config.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=config.api_keys)
    if is_loopback(config.host):
        app.add_middleware(LocalHostMiddleware, names=(config.host, *config.allowed_hosts))
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client sends a dozen of its own
            expose_headers=[REQUEST_ID_HEADER, IGNORED_FIELDS_HEADER, "retry-after"],
        )


def _add_error_answers(app: FastAPI) -> None:
    async def of_api(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.content(), error.status, error.headers)

    async def of_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        refusal = validation_error(error.errors())
        return JSONResponse(refusal.content(), refusal.status)

    async def of_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # FastAPI raises it for a body that it can't parse
            return JSONResponse(unreadable_body().content(), 400)
        refusal = ApiError(error.status_code, str(error.detail), code=_code(error.status_code))
        return JSONResponse(refusal.content(), error.status_code, error.headers)

    async def of_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def of_anything(request: Request, error: Exception) -> Response:
        dead = request.app.state.server.engine.failure is not None
        answer = engine_failed() if dead else internal_error()
        return JSONResponse(answer.content(), 500, request_id_headers(request.scope))

    app.add_exception_handler(ApiError, of_api)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(ClientGoneError, of_gone)
    app.add_exception_handler(Exception, of_anything)


def _code(status: int) -> str | None:
    return {404: "not_found", 405: "method_not_allowed"}.get(status)


def _without_422(document: dict[str, Any]) -> dict[str, Any]:
    """What is wrong with a body is answered with 400 here."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
    return document
