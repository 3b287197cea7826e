"""What completions and chats have in common: from a request's fields to streams, and usage."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from loadproof.engine.admission import ClosedError, TooLongError
from loadproof.engine.output import CompletionOutput, RequestOutput
from loadproof.engine.request import CUT_OFF
from loadproof.server.async_engine import Ask
from loadproof.server.deadline import Deadline
from loadproof.server.errors import ApiError, bad_request, unavailable, unsupported
from loadproof.server.json_parts import Parts
from loadproof.server.request_record import record_generation
from loadproof.server.schemas.base import RequestModel
from loadproof.server.state import ServerState
from loadproof.server.stream import Stream

_T = TypeVar("_T")

# How messages of the engine and the tokenizer begin: with what they are about, where that is one part.
_NUMBERED = re.compile(r"(prompt|continuation)s? (\d+)(?: of \d+)?: ")
_FIELD = re.compile(r"(\w+)[\w.\[\]]*")
MOST_CHOICES, MOST_IN_LOOP = 16, 512
"""Choices of an answer, and log-probabilities of a piece, that are written in the event loop."""

_LISTS = {"prompt": "prompt", "continuation": "continuations"}


@contextmanager
def refusing(
    body: RequestModel, prompt_field: str, renamed: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Answer 400 to what the model or its tokenizer can't take, naming the field at fault.

    That is ``prompt_field`` unless the error names another; ``renamed`` are fields with other names here.
    """
    try:
        yield
    except ClosedError as error:
        raise unavailable("The server is shutting down.") from error
    except ValueError as error:
        message, param = _placed(str(error), body, renamed or {})
        code = (
            "context_length_exceeded"
            if isinstance(error, TooLongError) or isinstance(error.__cause__, TooLongError)
            else "invalid_value"
        )
        raise bad_request(message, param or prompt_field, code) from error


def _placed(message: str, body: RequestModel, renamed: Mapping[str, str]) -> tuple[str, str | None]:
    """The message with its parts named as they are here, and the one that it is about."""
    numbered = _NUMBERED.match(message)
    rest = message if numbered is None else message[numbered.end() :]
    named = _FIELD.match(rest)
    if named is not None and named[1] in {*type(body).model_fields, *renamed}:
        field = renamed.get(named[0], named[0])
        return field + rest[named.end() :], field
    if numbered is None:
        return message, None
    place = f"{_LISTS[numbered[1]]}[{int(numbered[2]) - 1}]"
    return f"{place}: {rest}", place


def submit(
    state: ServerState, asks: Sequence[Ask], deadline: Deadline | None, prompts_field: str = "prompt"
) -> list[Stream]:
    """Queue the requests of one call. Raises ``ValueError`` for what the model can't serve."""
    streams = state.engine.submit(asks, deadline, prompts_field)
    record_generation(asks, streams)
    return streams


async def results(state: ServerState, streams: Sequence[Stream]) -> list[RequestOutput]:
    """All outputs, in order; after an error, or a cancellation, nothing of the call goes on."""
    try:
        return [await stream.result() for stream in streams]
    finally:
        state.engine.abort(streams)


async def made(make: Callable[[_T], Parts], what: _T, *, is_large: bool) -> Parts:
    """What ``make`` returns; what is large is made where it keeps nobody waiting."""
    return await asyncio.to_thread(make, what) if is_large else make(what)


def check_text_format(response_format: dict[str, Any] | None) -> None:
    """400 for answers in other forms than text."""
    if response_format is not None and response_format.get("type") != "text":
        raise unsupported("response_format", "response_format is supported with {'type': 'text'} only")


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """The ``usage`` of an answer."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of(outputs: Sequence[RequestOutput], num_output: int | None = None) -> dict[str, Any]:
    """The usage of a call: each prompt counts once, however many completions it has."""
    if num_output is None:
        num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        num_output,
        sum(output.num_cached_tokens for output in outputs),
    )


def finish_reason(completion: CompletionOutput) -> str:
    """How a completion ended, by itself."""
    if completion.finish_reason is None or completion.finish_reason in CUT_OFF:
        raise ApiError(500, "The request was aborted.", kind="server_error", code="aborted")
    return completion.finish_reason
