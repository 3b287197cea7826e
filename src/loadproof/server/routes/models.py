"""``GET /v1/models``, ``/version`` and ``/health``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from loadproof import __version__
from loadproof.server.errors import ApiError, model_not_found, unavailable
from loadproof.server.routes.documented import errors
from loadproof.server.schemas.models import Health, ModelCard, ModelList, Version
from loadproof.server.state import ServerState, state_of

router = APIRouter()


@router.get("/v1/models", response_model=ModelList, responses=errors(), summary="List the models")
async def list_models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_card(state_of(request))]}


@router.get(
    "/v1/models/{model:path}", response_model=ModelCard, responses=errors(404), summary="Describe a model"
)
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """The served model, by its name."""
    state = state_of(request)
    if model != state.model_name:
        raise model_not_found(model, state.model_name)
    return _card(state)


@router.get("/version", response_model=Version, responses=errors(), summary="Version and fingerprint")
async def version(request: Request) -> dict[str, str]:
    """The server's version, and what its answers depend on besides the request."""
    return {"version": __version__, "system_fingerprint": state_of(request).llm.system_fingerprint}


@router.get("/health", response_model=Health, responses=errors(503), summary="Is the engine well?")
async def health(request: Request) -> dict[str, str]:
    """200 once the engine's own thread has answered; 503 where it is dead, frozen or going away."""
    state = state_of(request)
    if state.engine.draining:
        raise unavailable("The server is shutting down.")
    try:
        await state.engine.call(lambda engine: None, state.config.health_timeout)
    except TimeoutError as error:
        raise unavailable("The engine does not answer.") from error
    except ApiError as error:
        raise unavailable("The engine has failed.") from error
    return {"status": "ok"}


def _card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "loadproof",
        "root": state.llm.config.model,
        "parent": None,
        "max_model_len": state.llm.max_model_len,
        "system_fingerprint": state.llm.system_fingerprint,
    }
