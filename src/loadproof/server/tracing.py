"""OpenTelemetry traces, where an endpoint for them is set; they need the extra ``otel``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loadproof.server.settings import ServerConfig, ServerConfigError

if TYPE_CHECKING:
    from loadproof.llm import LLM
    from loadproof.server.spans import Spans


def open_tracing(config: ServerConfig, llm: LLM) -> Spans | None:
    """What writes spans to the endpoint of ``config``; None where there isn't any.

    Raises :class:`ServerConfigError` as :func:`check_tracing` does.
    """
    check_tracing(config)
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    from loadproof.server.spans import Spans, exporting_provider

    return Spans(exporting_provider(endpoint), llm.model_name, llm.system_fingerprint)


def check_tracing(config: ServerConfig) -> None:
    """Raise :class:`ServerConfigError` for an endpoint that is no URL, and where the extra is missing."""
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return
    _check_url(endpoint)
    try:
        importlib.import_module("loadproof.server.spans")
    except ImportError as error:
        raise ServerConfigError(
            f"otlp_traces_endpoint needs a package that isn't there ({error.name}): "
            "pip install 'loadproof[otel]'"
        ) from error


def _check_url(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ServerConfigError(
            f"otlp_traces_endpoint must be a URL like http://localhost:4318/v1/traces, not {endpoint!r}"
        )
