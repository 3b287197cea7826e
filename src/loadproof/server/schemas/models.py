"""``/v1/models``, ``/version`` and ``/health``."""

from __future__ import annotations

from typing import Literal

from loadproof.server.schemas.base import AnswerModel


class ModelCard(AnswerModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int
    system_fingerprint: str


class ModelList(AnswerModel):
    """All models: the one."""

    object: Literal["list"]
    data: list[ModelCard]


class Version(AnswerModel):
    """The server's version, and what answers depend on besides the request."""

    version: str
    system_fingerprint: str


class Health(AnswerModel):
    """How the engine is."""

    status: Literal["ok"]
