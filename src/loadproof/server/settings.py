"""Every setting of the server, beside the engine's own, in one dataclass, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

# Variables that chat templates in use read and that change nothing but the prompt's wording.
TEMPLATE_ARGUMENTS = ("documents", "enable_thinking", "reasoning_effort", "thinking", "tools_in_user_message")
LOG_FORMATS = ("plain", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
METRICS_PREFIXES = ("loadproof", "vllm")


class ServerConfigError(ValueError):
    """Server settings that are wrong."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a user may set about the server. Raises :class:`ServerConfigError`, naming setting and value."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine reaches the default."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_keys: tuple[str, ...] = ()
    """Keys, any of which opens every route; none leaves them open to all."""
    strict: bool = False
    """Refuse fields that are not known, rather than name them in a header of the answer."""
    template_arguments: tuple[str, ...] = TEMPLATE_ARGUMENTS
    """Names that ``chat_template_kwargs`` may set."""
    max_queue: int = 1024
    """Most sequences that wait beside those that run; more are answered 429."""
    max_stream_backlog: int = 4096
    """Most pieces of each choice of a stream, 8 at least, that wait for its reader before it is cut off."""
    request_timeout: float | None = None
    """Most seconds that a request may take; its own ``timeout`` can only be shorter."""
    health_timeout: float = 20.0
    """Seconds within which the engine must answer for the server to count as healthy."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    max_body_size: int = 2 << 20
    """Most bytes of a request's body."""
    max_header_size: int = 64 << 10
    """Most bytes of a request's first line and headers."""
    read_timeout: float = 60.0
    """Seconds within which a whole request must have come; a connection that takes longer is closed."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which a server on a loopback address may be called, such as a proxy's."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of pages that browsers may let call the server."""
    ssl_certfile: Path | None = None
    """Certificate chain, PEM, to serve TLS with."""
    ssl_keyfile: Path | None = None
    """The certificate's key, where that is in a file of its own."""
    metrics_prefix: str = "loadproof"
    """What names of metrics begin with: "vllm" suits dashboards made for it."""
    log_format: str = "plain"
    """How log lines look: "plain" or "json"."""
    log_level: str = "info"
    """Least severity that is logged."""
    access_log: bool = True
    """Log a line a request."""
    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry spans are sent; needs the extra ``otel``."""

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise ServerConfigError(f"host must be an address or a name, not {self.host!r}")
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queue", 0, 1 << 20),
            ("max_stream_backlog", 1, 1 << 24),
            ("max_body_size", 1024, 1 << 32),
            ("max_header_size", 1024, 1 << 24),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ServerConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
        for name in ("request_timeout", "health_timeout", "shutdown_timeout", "read_timeout"):
            seconds = getattr(self, name)
            if seconds is None and name == "request_timeout":
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not _is_time(seconds):
                raise ServerConfigError(f"{name} must be seconds, 0 or more, not {seconds!r}")
        if self.read_timeout == 0:
            raise ServerConfigError("read_timeout must be more than 0 seconds: no request comes in none")
        for name, choices in (
            ("log_format", LOG_FORMATS),
            ("log_level", LOG_LEVELS),
            ("metrics_prefix", METRICS_PREFIXES),
        ):
            if getattr(self, name) not in choices:
                raise ServerConfigError(f"{name} must be {' or '.join(choices)}, not {getattr(self, name)!r}")
        self._check_security()

    def _check_security(self) -> None:
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ServerConfigError("an api_key must be ASCII text without space around it, and not empty")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ServerConfigError("ssl_keyfile needs ssl_certfile")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ServerConfigError(f"{name}: there is no file {path}")


def _is_time(seconds: float) -> bool:
    return seconds >= 0 and math.isfinite(seconds)
