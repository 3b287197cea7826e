"""What goes wrong, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """What an error says: ``param`` is the field at fault, ``code`` a name that programs can rely on."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody


class ApiError(Exception):
    """An answer other than success; whoever raises it chooses status and words."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = _encodable(message)
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(
            message=message, type=kind, param=None if param is None else _encodable(param), code=code
        )
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """The answer's body as plain data."""
        return {"error": self.body.model_dump()}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request can't be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: a field of OpenAI's that this server doesn't know how to serve."""
    return bad_request(message, param, "unsupported_parameter")


def model_not_found(name: str, known: str) -> ApiError:
    """404: a model other than the one that is served."""
    return ApiError(
        404,
        f"The model {name!r:.200} does not exist; this server has {known!r}.",
        param="model",
        code="model_not_found",
    )


def too_busy(message: str, retry_after: int) -> ApiError:
    """429: come again later."""
    return ApiError(
        429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": str(retry_after)}
    )


def timed_out(seconds: float) -> ApiError:
    """408: the request's own deadline has passed; trying again by itself would not help."""
    return ApiError(
        408,
        f"The request was not finished within its {seconds:g} seconds.",
        kind="timeout_error",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
    )


def unavailable(message: str) -> ApiError:
    """503: the server is going away."""
    return ApiError(503, message, kind="server_error", code="unavailable", headers={"Retry-After": "5"})


def engine_failed() -> ApiError:
    """500: the engine has died; the log says why, the answer doesn't."""
    return ApiError(
        500, "The engine has failed; see the server's log.", kind="server_error", code="engine_dead"
    )


def internal_error() -> ApiError:
    """500: a fault of the server's own."""
    return ApiError(
        500, "The server has failed to answer; see its log.", kind="server_error", code="internal_error"
    )


def reader_too_slow(limit: int) -> ApiError:
    """500, in a stream that nobody reads."""
    return ApiError(
        500, f"More than {limit} pieces were waiting to be read.", kind="server_error", code="reader_too_slow"
    )


def _encodable(text: str) -> str:
    """A text without lone surrogates, which names and values in a body may have."""
    return text.encode("utf-8", "backslashreplace").decode()
