"""The engine for asyncio: one thread makes its steps, and each request's pieces come to the event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from loadproof.engine.engine import Engine
from loadproof.engine.output import CompletionDelta, RequestOutput
from loadproof.engine.prompts import TokenizedPrompt, naming
from loadproof.engine.sampling_params import SamplingParams
from loadproof.server.deadline import Deadline
from loadproof.server.errors import (
    bad_request,
    engine_failed,
    reader_too_slow,
    too_busy,
    unavailable,
)
from loadproof.server.observer import NoObserver, Observer, RequestTimes
from loadproof.server.rate import Rate
from loadproof.server.stream import Stream

_log = logging.getLogger("loadproof.engine")
_T = TypeVar("_T")
_STOP_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request as a route makes it: one prompt, and how to complete it."""

    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int = 0
    wants_deltas: bool = False


@dataclass(eq=False, slots=True)
class _Watch:
    """What is timed of one request, in the engine's thread."""

    times: RequestTimes
    last: dict[int, float]  # by completion: when its newest token came


class AsyncEngine:
    """Owns an :class:`Engine` and the one thread that touches it.

    Everything here belongs to the event loop that called :meth:`start`, but for what is marked as the
    thread's own. The thread takes commands between steps and hands over what a step brought at once. If it
    dies every request fails, and those to come as well.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int = 1024,
        max_stream_backlog: int = 4096,
        observer: Observer | None = None,
    ) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._limit = engine.device.limits.max_num_seqs + max_queue
        self._max_queue = max_queue
        self._max_backlog = max_stream_backlog
        self._observer = observer or NoObserver()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._num_sequences = 0
        self.draining = False
        self._finishing = Rate()
        self._numbers = itertools.count()
        self._calls: set[asyncio.Future[Any]] = set()
        self._outbox: list[tuple[Stream, CompletionDelta | RequestOutput]] = []  # the thread's own
        self._stopping = False  # the thread's own
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # The event loop's side.

    @property
    def num_sequences(self) -> int:
        """Sequences that have come and not ended."""
        return self._num_sequences

    @property
    def most_sequences(self) -> int:
        """Most sequences that may run and wait."""
        return self._limit

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self.failure is None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; the running loop is where everything arrives."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(
        self, asks: Sequence[Ask], deadline: Deadline | None = None, prompts_field: str = "prompt"
    ) -> list[Stream]:
        """Queue requests, all or none, and return their streams in order.

        Raises a ``ValueError`` for what the model can't serve, and :class:`ApiError` where there is no room,
        or no engine; prompts that are too many for one call are refused by the name ``prompts_field``. Those
        not finished by the ``deadline`` fail. Whoever submits must read each stream to its end, or give it
        to :meth:`abort`.
        """
        for index, ask in enumerate(asks):
            with naming(index, len(asks)):
                self.engine.check_request(
                    ask.prompt.token_ids, ask.params, priority=ask.priority, cache_salt=ask.prompt.cache_salt
                )
        self._check_room(sum(ask.params.n for ask in asks), "n" if len(asks) == 1 else prompts_field)
        streams = []
        for ask in asks:
            stream = Stream(str(next(self._numbers)), ask.params.n, ask.wants_deltas, self._max_backlog)
            self._streams[stream.request_id] = stream
            self._num_sequences += stream.num_sequences
            self._finishing.set_busy(True)
            self._commands.put(self._adding(ask, stream))
            streams.append(stream)
            if deadline is not None:
                timer = self._loop.call_at(deadline.at, self._cut, stream, deadline.error())
                self._timers[stream.request_id] = timer
        return streams

    def abort(self, streams: Iterable[Stream]) -> None:
        """End requests whose caller has gone; those that have ended are passed over."""
        for stream in streams:
            if stream.request_id in self._streams:
                self._forget(stream)
                self._commands.put(self._aborting(stream.request_id))

    async def call(self, function: Callable[[Engine], _T], timeout: float | None = None) -> _T:
        """What ``function`` returns, called in the thread between two steps.

        Raises :class:`TimeoutError` where that takes more than ``timeout`` seconds, and :class:`ApiError`
        where the engine has died.
        """
        answer: asyncio.Future[_T] = self._loop.create_future()

        def command() -> None:
            try:
                value = function(self.engine)
            except Exception as error:
                self._send(_set_exception, answer, error)
            else:
                self._send(_set_result, answer, value)

        if not self.alive:
            raise engine_failed()
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        self._commands.put(command)
        return await asyncio.wait_for(answer, timeout)

    async def drain(self, timeout: float, hurry: asyncio.Event | None = None) -> None:
        """Take no more requests, and give those there are so many seconds to finish; then cut them off.

        ``hurry`` ends the wait.
        """
        self.draining = True
        end = self._loop.time() + timeout
        while self._streams and self.alive and self._loop.time() < end and not (hurry and hurry.is_set()):
            await asyncio.sleep(0.02)
        for stream in list(self._streams.values()):
            self._cut(stream, unavailable("The server is shutting down."))

    async def stop(self, timeout: float = _STOP_SECONDS) -> None:
        """End the thread, after the step it is making, and close the engine.

        A step that takes longer than ``timeout`` seconds is left behind, which counts as a failure.
        """
        if self._thread.is_alive():
            self._commands.put(self._stop)
            await asyncio.to_thread(self._thread.join, timeout)
        if self._thread.is_alive():
            self.failure = TimeoutError("a step did not end")
            _log.critical("the engine does not answer: it is left as it is")
        elif self.failure is None:
            await asyncio.to_thread(self.engine.close)

    def _check_room(self, count: int, param: str) -> None:
        if not self.alive:
            raise engine_failed()
        if self.draining:
            raise unavailable("The server is shutting down.")
        if count > self._limit:
            raise bad_request(
                f"{count} sequences in one request; at most {self._limit} may run and wait in all.", param
            )
        if self._num_sequences + count > self._limit:
            raise too_busy(
                f"{self._num_sequences} sequences run or wait, and {count} more are too many: "
                f"at most {self._max_queue} may wait.",
                self._finishing.seconds_for(self._num_sequences + count - self._limit),
            )

    def _cut(self, stream: Stream, error: Exception) -> None:
        """End a request for its reader too."""
        stream.fail(error)
        self.abort([stream])

    def _forget(self, stream: Stream) -> None:
        if self._streams.pop(stream.request_id, None) is not None:
            self._num_sequences -= stream.num_sequences
            self._finishing.set_busy(self._num_sequences > 0)
            timer = self._timers.pop(stream.request_id, None)
            if timer is not None:
                timer.cancel()

    def _deliver(self, news: list[tuple[Stream, CompletionDelta | RequestOutput]]) -> None:
        for stream, item in news:
            if stream.request_id not in self._streams:
                continue
            if isinstance(item, CompletionDelta):
                stream.push(item)
                if stream.is_behind:
                    self._cut(stream, reader_too_slow(stream.most_waiting))
            else:
                self._forget(stream)
                self._finishing.count(stream.num_sequences)
                stream.finish(item)

    def _refuse(self, stream: Stream, error: Exception) -> None:
        self._forget(stream)
        stream.fail(error)

    def _fail_all(self) -> None:
        for stream in list(self._streams.values()):
            self._refuse(stream, engine_failed())
        for answer in list(self._calls):
            _set_exception(answer, engine_failed())

    # The thread's side.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                self.engine.step()
                self._flush()
        except BaseException as error:
            self.failure = error
            _log.critical("the engine has failed: every request ends", exc_info=error)
            self._send(self._fail_all)

    def _take_commands(self) -> None:
        """All there are; without work, wait for the first."""
        if not self.engine.has_unfinished():
            self._commands.get()()
        while not self._stopping:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _flush(self) -> None:
        if self._outbox:
            self._send(self._deliver, self._outbox)
            self._outbox = []

    def _send(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody is left to hear
            self._stopping = True

    def _stop(self) -> None:
        self._stopping = True

    def _aborting(self, request_id: str) -> Callable[[], None]:
        def command() -> None:
            self.engine.abort_request(request_id)

        return command

    def _adding(self, ask: Ask, stream: Stream) -> Callable[[], None]:
        watch = _Watch(stream.times, {})

        def on_delta(delta: CompletionDelta) -> None:
            if delta.token_ids:
                self._time_token(watch, delta.index)
            if stream.wants_deltas:
                self._outbox.append((stream, delta))

        def on_output(output: RequestOutput) -> None:
            watch.times.ended = time.perf_counter()
            self._observer.finished(output, ask.params, watch.times)
            self._outbox.append((stream, output))

        def command() -> None:
            try:
                self.engine.add_request(
                    ask.prompt.token_ids,
                    ask.params,
                    prompt=ask.prompt.text,
                    request_id=stream.request_id,
                    priority=ask.priority,
                    cache_salt=ask.prompt.cache_salt,
                    on_start=lambda: self._time_start(watch.times),
                    on_delta=on_delta,
                    on_output=on_output,
                )
            except ValueError as error:
                self._send(self._refuse, stream, error)

        return command

    def _time_start(self, times: RequestTimes) -> None:
        times.started = time.perf_counter()
        self._observer.started(times.started - times.arrived)

    def _time_token(self, watch: _Watch, index: int) -> None:
        now = time.perf_counter()
        before = watch.last.get(index)
        if before is None:
            if watch.times.first_token is None:
                watch.times.first_token = now
            self._observer.first_token(now - watch.times.arrived)
        else:
            self._observer.next_token(now - before)
        watch.last[index] = watch.times.last_token = now


def _set_result(answer: asyncio.Future[_T], value: _T) -> None:
    if not answer.done():
        answer.set_result(value)


def _set_exception(answer: asyncio.Future[_T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
