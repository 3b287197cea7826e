"""One request's pieces on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from loadproof.engine.output import CompletionDelta, RequestOutput
from loadproof.server.observer import RequestTimes

_FEWEST = 8  # a step's pieces come at once, and the next step's may before they are read


@dataclass(eq=False)
class Stream:
    """What one request brings; lives in the event loop, which alone touches it.

    It ends with :attr:`output`, or with the :attr:`error` that cut it off. One that is not ``wants_deltas``
    gets the output alone.
    """

    request_id: str
    num_sequences: int
    wants_deltas: bool
    max_backlog: int
    output: RequestOutput | None = None
    error: Exception | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    _deltas: deque[CompletionDelta] = field(default_factory=deque)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.output is not None or self.error is not None

    @property
    def is_behind(self) -> bool:
        """Whether more pieces wait for the reader than may."""
        return len(self._deltas) > self.most_waiting

    @property
    def most_waiting(self) -> int:
        """Most pieces that may wait: so many of each of its sequences."""
        return max(self.max_backlog, _FEWEST) * self.num_sequences

    def push(self, delta: CompletionDelta) -> None:
        """Add a piece; one that comes after the end is dropped."""
        if not self.ended:
            self._deltas.append(delta)
            self._news.set()

    def finish(self, output: RequestOutput) -> None:
        """End with the whole output, after all its pieces."""
        if not self.ended:
            self.output = output
            self._news.set()

    def fail(self, error: Exception) -> None:
        """End with an error; pieces that nobody has read are dropped."""
        if not self.ended:
            self.error = error
            self._deltas.clear()
            self._news.set()

    async def deltas(self) -> AsyncIterator[list[CompletionDelta]]:
        """All pieces that have come, whenever there are any, until the end; raises the error there is."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self.error is not None:
                raise self.error
            if self._deltas:
                ready = list(self._deltas)
                self._deltas.clear()
                yield ready
            if self.error is not None:
                raise self.error
            if self.output is not None and not self._deltas:
                return

    async def result(self) -> RequestOutput:
        """The whole output; raises the error there is."""
        while not self.ended:
            await self._news.wait()
            self._news.clear()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, list[CompletionDelta]], None]:
    """The pieces of several streams as they come, each with its stream's place; the first error ends it.

    No more is taken from the streams than is asked for here, so what waits is counted as their backlog.
    """
    if len(streams) == 1:
        async for deltas in streams[0].deltas():
            yield 0, deltas
        return
    ready: asyncio.Queue[tuple[int, list[CompletionDelta] | Exception | None]] = asyncio.Queue(1)

    async def read(place: int) -> None:
        try:
            async for deltas in streams[place].deltas():
                await ready.put((place, deltas))
            await ready.put((place, None))
        except Exception as error:
            await ready.put((place, error))

    readers = [asyncio.ensure_future(read(place)) for place in range(len(streams))]
    try:
        unfinished = len(streams)
        while unfinished:
            place, news = await ready.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                unfinished -= 1
            else:
                yield place, news
    finally:
        for reader in readers:
            reader.cancel()
