"""What every route needs, made once when the server starts."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fastapi import Request

from loadproof.server.encoder import Encoder
from loadproof.server.errors import bad_request, model_not_found
from loadproof.server.schemas.base import RequestModel

if TYPE_CHECKING:
    from loadproof.llm import LLM
    from loadproof.server.async_engine import AsyncEngine
    from loadproof.server.metrics import Metrics
    from loadproof.server.settings import ServerConfig

IGNORED_FIELDS_HEADER = "x-ignored-fields"


@dataclass(frozen=True)
class ServerState:
    """The model, its engine and the settings. ``created`` is the start in seconds since 1970."""

    llm: LLM
    engine: AsyncEngine
    config: ServerConfig
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def encoder(self) -> Encoder:
        """Where texts are encoded."""
        return Encoder(self.engine.most_sequences)

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.llm.model_name

    def check_model(self, name: str | None) -> None:
        """404 for a model that isn't the served one; no name means that."""
        if name is not None and name != self.model_name:
            raise model_not_found(name, self.model_name)

    def check_fields(self, body: RequestModel) -> dict[str, str]:
        """Headers that name the fields which mean nothing here; 400 instead where the server is strict."""
        unknown = body.unknown_fields()
        if not unknown:
            return {}
        if self.config.strict:
            raise bad_request(
                f"unknown fields: {', '.join(unknown)}"[:500], unknown[0][:100], "unknown_field"
            )
        names = ", ".join(_in_header(name) for name in unknown)
        return {IGNORED_FIELDS_HEADER: names[:1000]}


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state


def new_id(kind: str) -> str:
    """An answer's name."""
    return f"{kind}-{uuid.uuid4().hex}"


def _in_header(name: str) -> str:
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name[:100])
