"""What is wrong with a body, in words for those who wrote it: the first fault, its place and its value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadproof.server.errors import ApiError
from loadproof.server.schemas.shapes import SHAPE_ERROR, SHAPE_MARK

_SHOWN = 60  # characters of a wrong value

# By pydantic's kinds of errors: what the value must be instead. The dict holds the bounds that it broke.
_WANTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": lambda _: "an integer",
    "int_parsing_size": lambda _: "an integer of fewer digits",
    "float_type": lambda _: "a number",
    "finite_number": lambda _: "a finite number",
    "bool_type": lambda _: "true or false",
    "string_type": lambda _: "text",
    "list_type": lambda _: "a list",
    "dict_type": lambda _: "an object",
    "model_type": lambda _: "an object",
    "model_attributes_type": lambda _: "an object",
    "literal_error": lambda bounds: str(bounds["expected"]),
    "greater_than_equal": lambda bounds: f"at least {bounds['ge']:g}",
    "greater_than": lambda bounds: f"above {bounds['gt']:g}",
    "less_than_equal": lambda bounds: f"at most {_number(bounds['le'])}",
    "string_pattern_mismatch": lambda _: "a token id in decimal digits",
}


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The answer to what FastAPI found wrong: 415 for a body that isn't meant as JSON, else 400."""
    first = errors[0]
    kind, bounds, value = first["type"], first.get("ctx") or {}, first.get("input")
    if kind == SHAPE_ERROR:
        bounds = {"wanted": first["msg"]}
    if kind == "json_invalid":
        return ApiError(400, f"The body is not JSON: {bounds['error']}.", code="invalid_json")
    param = place(first["loc"])
    if not param:
        return _of_whole_body(kind, value)
    return ApiError(400, f"{param} {_fault(kind, bounds, value)}"[:1000], param=param, code="invalid_value")


def unreadable_body() -> ApiError:
    """The answer to a body that no parser of JSON gets through."""
    words = "it must be UTF-8, without numbers of thousands of digits or nesting of hundreds of levels"
    return ApiError(400, f"The body can't be read as JSON: {words}.", code="invalid_json")


def place(steps: Sequence[int | str]) -> str:
    """The field at fault as clients write it: ``messages[0].content``."""
    path = ""
    for step in steps[1:]:  # the first one is "body"
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]" and not step.startswith(SHAPE_MARK):
            path += f".{step}" if path else step
    return path[:200]


def _of_whole_body(kind: str, value: object) -> ApiError:
    if isinstance(value, bytes):
        return ApiError(
            415,
            "The body is read as JSON: send it with content-type: application/json.",
            code="unsupported_media_type",
        )
    if kind == "missing":
        words = "is missing"
    elif kind == "string_unicode":
        words = "has a name with a lone surrogate, which is no Unicode text"
    else:
        words = f"must be a JSON object, not {_shown(value)}"
    return ApiError(400, f"The body {words}.", code="invalid_value")


def _fault(kind: str, bounds: Mapping[str, Any], value: object) -> str:
    if kind == "missing":
        return "is required"
    if kind == "string_unicode":
        return "has a lone surrogate, which is no Unicode text"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind == "too_long":
        return f"has more than {bounds['max_length']} entries"
    if kind == "string_too_long":
        return f"has more than {bounds['max_length']} characters"
    wanted = _WANTED[kind](bounds) if kind in _WANTED else bounds.get("wanted")
    return "is not as it should be" if wanted is None else f"must be {wanted}, not {_shown(value)}"


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _shown(value: object) -> str:
    """A value as JSON, its end cut off where it is long."""
    if isinstance(value, str | list | dict) and len(value) > _SHOWN:
        kinds = {str: "text", list: "a list", dict: "an object"}
        unit = "characters" if isinstance(value, str) else "entries"
        return f"{kinds[type(value)]} of {len(value)} {unit}"
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something deeply nested"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
