"""Answers as parts of JSON: what is large is encoded once, in slices, and away from the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")
_PIECE = 1 << 18  # bytes handed over at a time: between two the reader's pace is felt
_SLICE = 4096  # entries encoded at a time, for an encoder keeps all other threads waiting

Parts = list[bytes]
"""JSON in parts, in order. Parts may belong to several answers."""


def with_members(content: Mapping[str, object], members: Mapping[str, Iterable[bytes]]) -> Parts:
    """The object ``content``, and behind its own members those whose values are JSON already."""
    parts = [to_json(content)[:-1]]
    for place, (name, value) in enumerate(members.items()):
        parts.append((b"," if content or place else b"") + to_json(name) + b":")
        parts += value
    parts.append(b"}")
    return parts


def list_of(entries: Iterable[Iterable[bytes]]) -> Parts:
    """A list of entries that are JSON already, or runs of entries with commas between them."""
    parts = [b"["]
    for entry in entries:
        if len(parts) > 1:
            parts.append(b",")
        parts += entry
    parts.append(b"]")
    return parts


def slices(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """The items some at a time, where each makes ``size`` entries of JSON."""
    step = max(1, _SLICE // size)
    for first in range(0, len(items), step):
        yield items[first : first + step]


def run_of(entries: Sequence[object]) -> bytes:
    """Entries of a list, at least one, with commas between them: for :func:`list_of`."""
    return to_json(entries)[1:-1]


class PartsResponse(Response):
    """Sends JSON in parts, no faster than it is read."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the answer."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        for piece in _pieces(self._parts):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    held: Parts = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= _PIECE:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)
