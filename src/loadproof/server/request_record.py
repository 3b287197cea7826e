"""What is known of a request while it is served: for its log line, its metrics and its span."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from loadproof.server.errors import ApiError

if TYPE_CHECKING:
    from loadproof.engine.output import RequestOutput
    from loadproof.server.async_engine import Ask
    from loadproof.server.stream import Stream

REQUEST_ID_HEADER = "x-request-id"
UNROUTED = "none"
NO_ANSWER = 499  # what web servers log where the client was gone before there was an answer

current_record: ContextVar[RequestRecord | None] = ContextVar("loadproof_request_record", default=None)
"""The record of the request that the running task serves."""


@dataclass(eq=False)
class RequestRecord:
    """One HTTP request, as it came and as it was answered; belongs to the event loop."""

    request_id: str
    method: str
    path: str
    client: str
    headers: Headers
    began: float = field(default_factory=time.perf_counter)
    began_ns: int = field(default_factory=time.time_ns)
    handler: str = UNROUTED
    """The path of the route that served it, with its variables' names."""
    status: int | None = None
    """What was answered, if anything."""
    complete: bool = False
    """Whether the whole answer was sent."""
    seconds: float = 0.0
    """How long it took, once it is over."""
    asks: Sequence[Ask] = ()
    streams: Sequence[Stream] = ()

    @property
    def outputs(self) -> list[RequestOutput]:
        """What has been generated for it; those that were cut off are missing."""
        return [stream.output for stream in self.streams if stream.output is not None]

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of its prompts, if it has any."""
        return sum(len(ask.prompt.token_ids) for ask in self.asks) if self.asks else None

    @property
    def num_output_tokens(self) -> int | None:
        """Tokens that were generated for it, if all was."""
        outputs = self.outputs
        if not outputs or len(outputs) < len(self.streams):
            return None
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    @property
    def error(self) -> str | None:
        """A name for what went wrong: the server's fault, or what cut a stream off that had begun well."""
        for stream in self.streams:
            if isinstance(stream.error, ApiError):
                return stream.error.body.code or str(stream.error.status)
        return str(self.status) if self.status is not None and self.status >= 500 else None


def record_generation(asks: Sequence[Ask], streams: Sequence[Stream]) -> None:
    """Note what the request that is being served has the engine do."""
    record = current_record.get()
    if record is not None:
        record.asks, record.streams = asks, streams
