"""What the OpenAPI document says about answers that are no success."""

from __future__ import annotations

from typing import Any

from loadproof.server.errors import ErrorResponse

_MEANINGS = {
    400: "The request can't be served as it is.",
    401: "An API key is missing or wrong.",
    403: "The name that the server was called by isn't this machine's.",
    404: "There is no such model.",
    408: "The request's deadline has passed.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    429: "Too many requests wait already.",
    431: "The headers are too large.",
    500: "The engine has failed, or the server itself.",
    503: "The server is shutting down, or its engine does not answer.",
}

# Validators take the schema of a stream for that of each of its events.
_EVENT = {
    "type": "object",
    "description": "One event: `data` is a chunk of the answer as JSON, or `[DONE]` at the end.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Entries of ``responses`` for statuses, and those that every route may answer."""
    return {
        status: {"model": ErrorResponse, "description": _MEANINGS[status]}
        for status in sorted({401, 403, 431, *statuses})
    }


def streamed(model: type) -> dict[int | str, dict[str, Any]]:
    """The entry of an answer that is ``model``, or a stream of events."""
    return {
        200: {
            "model": model,
            "description": "The answer, or with `stream` its pieces as server-sent events.",
            "content": {"text/event-stream": {"schema": _EVENT}},
        }
    }


GENERATION_ERRORS = (400, 404, 408, 413, 415, 429, 500, 503)
