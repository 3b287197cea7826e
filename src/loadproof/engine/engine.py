"""The engine: requests go in, each step moves all of them on, outputs come out by callback."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from loadproof.engine.admission import ClosedError, Door, RequestError, check_placing
from loadproof.engine.completion import Completion
from loadproof.engine.group import Group
from loadproof.engine.lock import FairLock
from loadproof.engine.output import CompletionDelta, RequestOutput
from loadproof.engine.pipeline import LogitsHook, NewToken, Pipeline, PipelineOptions
from loadproof.engine.request import CUT_OFF, FinishReason, Request
from loadproof.engine.sampling_params import SamplingParams
from loadproof.engine.scheduler import SchedulerOptions
from loadproof.engine.seeds import SeedSource, seed_of
from loadproof.engine.sequence_progress import SequenceProgress, progress_of

if TYPE_CHECKING:
    from loadproof.devices.device import Device
    from loadproof.tokenizer.tokenizer import Tokenizer

__all__ = ["Engine", "LogitsHook"]


class Engine:
    """Serves any number of requests on one device; any number of threads may call it.

    Owns the device from construction to :meth:`close`. Listeners are called by whichever thread makes the
    step, holding the engine's lock; they may add and abort requests, but neither step nor close.
    ``on_logits``, where set, is called with (request id, completion index, position of the sampled token,
    raw logits ``[vocab_size]``) for every token, before anybody sees that, and again where a step failed
    after it: a hook for exactness tests and tools.
    """

    def __init__(
        self,
        device: Device,
        tokenizer: Tokenizer,
        *,
        seed: int | None = None,
        max_logprobs: int = 20,
        scheduling: SchedulerOptions | None = None,
        pipeline: PipelineOptions | None = None,
    ) -> None:
        limits = device.limits
        # A tokenizer may name tokens beyond the model's vocabulary: those are never sampled.
        eos = frozenset(token_id for token_id in tokenizer.eos_token_ids if token_id < device.vocab_size)
        self.device = device
        self.tokenizer = tokenizer
        self.scheduling = scheduling or SchedulerOptions()
        self._door = Door(device.vocab_size, limits.max_model_len, max_logprobs, eos)
        self._pipeline = Pipeline(device, self.scheduling, pipeline)
        self._seeds = SeedSource(seed)
        self._groups: dict[str, Group] = {}
        self._started: list[Request] = []  # whose listeners have not been told, nor those of its group
        self._names = itertools.count()
        self._lock = FairLock()
        self._unsure = 0  # changes of the books that have begun and not come to their end
        self._busy = False  # within a change that calls listeners: what they call is a part of it
        self._left: deque[str] = deque()  # requests that nobody waits for, to be aborted
        self.leave: Callable[[Iterable[str]], None] = self._left.extend
        """Have requests aborted as the first thing done to the engine next.

        :meth:`abort_when_free` does that now, if it can. Not a function of Python's: no interrupt comes
        before it has begun, or divides it.
        """
        self._closed = False
        self._counters = dict.fromkeys(
            (
                "num_requests",
                "num_finished",
                "num_aborted",
                "generation_tokens",
            ),
            0,
        )

    @property
    def on_logits(self) -> LogitsHook | None:
        """The hook that gets every row of logits."""
        return self._pipeline.on_logits

    @on_logits.setter
    def on_logits(self, hook: LogitsHook | None) -> None:
        self._pipeline.on_logits = hook

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep other threads out of the engine for several calls."""
        return self._lock.held()

    def check_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[int]:
        """The prompt as a list, if a request can be served; raises :class:`RequestError` as adding it would.

        Needs no lock: it depends on the model and its settings alone.
        """
        ids = self._door.check_prompt(prompt_token_ids)
        self._door.check_params(params)
        self._door.check_prompt_logprobs(params, len(ids))
        check_placing(priority, cache_salt, self.scheduling.policy)
        return ids

    def new_request_id(self) -> str:
        """A name that is given once: whoever knows it first can abort the request wherever adding ends."""
        return str(next(self._names))

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_start: Callable[[], None] | None = None,
        on_delta: Callable[[CompletionDelta], None] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> str:
        """Queue a request and return its id; nothing is queued where it raises :class:`RequestError`.

        The lowest ``priority`` goes first where the policy is priority; no other one knows any but 0. Only
        requests of one ``cache_salt`` share cached prefixes. Within later steps ``on_start`` is called when
        the first of its completions has left the queue, ``on_delta`` gets each new token of each completion,
        and ``on_output`` the whole when all have finished or were aborted.
        """
        ids = self.check_request(prompt_token_ids, params, priority=priority, cache_salt=cache_salt)
        with self._entered():
            if self._closed:
                raise ClosedError("the engine is closed")
            name = self.new_request_id() if request_id is None else request_id
            if name in self._groups:
                raise RequestError(f"request id {name!r} is in use")
            requests = self._requests(name, ids, params, priority, cache_salt)
            completions = [Completion(request, self.tokenizer) for request in requests]
            group = Group(name, prompt, ids, completions, on_start, on_delta, on_output)
            self._unsure += 1
            for request in requests:
                self._pipeline.scheduler.add(request)
            self._counters["num_requests"] += 1
            self._groups[name] = group  # last: a restart drops what isn't here
            self._unsure -= 1
            return name

    def abort_request(self, request_id: str) -> bool:
        """End a request and free what it holds; its listener gets what there is. False if it is unknown."""
        with self._entered():
            group = self._groups.get(request_id)
            if group is None:
                return False
            if self._busy:
                self._end(group, "abort")
            else:
                self._left.append(request_id)
                self._catch_up()
            return True

    def abort_when_free(self) -> None:
        """End what was left, now if nobody uses the engine, or else before its next call.

        Never waits, wherever it is called: the garbage collector closes what was dropped, and runs within
        any call, the engine's own too.
        """
        with self._lock.held_if_free() as is_held:
            if is_held:
                self._catch_up()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Hold the lock, for a call that neither a broken off change nor a dropped request should show in."""
        with self._lock.held():
            if not self._busy:
                self._catch_up()
            yield

    def _catch_up(self) -> None:
        """Begin again if a change was broken off, and end the requests that nobody waits for.

        Wherever this is broken off itself, the next call does the rest.
        """
        if not (self._unsure or self._left):
            return
        self._busy = True
        try:
            if self._unsure:
                self._restart()
            self._unsure += 1
            while self._left:
                group = self._groups.get(self._left[0])
                if group is not None:
                    self._end(group, group.ending or "abort")
                self._left.popleft()  # last, so that it is done again where it was not done
            self._settle_if_idle()
            self._unsure -= 1
        finally:
            self._busy = False

    def _end(self, group: Group, reason: FinishReason) -> None:
        """Cut a group off, and hand it out as it is."""
        self._unsure += 1
        group.ending = reason
        try:
            for completion in group.completions:
                if not completion.request.finished:
                    self._pipeline.scheduler.finish(completion.request, reason)
                    text = completion.abort()
                    if group.on_delta is not None:
                        group.on_delta(completion.delta(text, num_tokens=0))
        except BaseException:
            group.on_delta = None  # it hears no more of a request that ends all the same
            raise
        self._complete(group)
        self._unsure -= 1

    def has_unfinished(self) -> bool:
        """Whether another step has work."""
        with self._entered():
            return self._pipeline.scheduler.has_unfinished()

    def step(self) -> None:
        """Move every request on as far as one step's token budget goes. Does nothing without requests.

        Raises :class:`RequestError` where a listener calls it: the step that called that is not over.
        """
        with self._entered():
            if self._busy:
                raise RequestError("no step, and so no generate, from within a step's own callback")
            if not self._pipeline.has_work():
                return
            try:
                self._step()
            except BaseException:
                with suppress(Exception):  # what failed first is told; the next call does the rest
                    self._catch_up()
                raise

    def _step(self) -> None:
        self._unsure += 1
        self._busy = True
        try:
            report = self._pipeline.advance()
            self._take_started()
            while self._started:
                group = self._groups.get(self._started[0].request_id)
                if group is not None:
                    group.tell_start()
                del self._started[0]
            if report is not None:
                for token in report.new_tokens:
                    self._show(token)
            self._settle_if_idle()
        finally:
            self._busy = False
        self._unsure -= 1

    def _settle_if_idle(self) -> None:
        """With no request left, take back what the step in flight still holds for finished ones."""
        if not self._pipeline.scheduler.has_unfinished():
            self._pipeline.settle()

    def _restart(self) -> None:
        """Have all requests go on from what their listeners know: what a broken off change did is unsure.

        It comes to the same wherever one before was broken off.
        """
        self._take_started()
        unfinished = []
        for group in self._groups.values():
            for completion in group.completions:
                completion.rewind()
                if not completion.request.finished:
                    unfinished.append(completion.request)
        self._pipeline.restart(unfinished)
        self._left.extend(name for name, group in self._groups.items() if group.ending is not None)
        self._unsure = 0

    def _take_started(self) -> None:
        """Note whom to tell of their start; a listener is told once, however often its group is noted."""
        started = self._pipeline.scheduler.newly_started
        self._started += started
        started.clear()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, those that running requests compute included; always true."""
        with self._entered():
            self._unsure += 1
            self._pipeline.scheduler.reset_prefix_cache()
            self._unsure -= 1
            return True

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is running now."""
        scheduler = self._pipeline.scheduler
        with self._entered():
            return {
                **self._counters,
                **asdict(scheduler.counters),
                "num_steps": self._pipeline.num_steps,
                "num_running": len(scheduler.running),
                "num_waiting": len(scheduler.waiting),
                "num_blocks": scheduler.pool.num_blocks,
                "num_free_blocks": scheduler.pool.num_free_blocks,
                "num_blank_blocks": scheduler.pool.num_blank_blocks,
                "num_cached_blocks": scheduler.pool.num_cached_blocks,
                "prefix_cache_evictions": scheduler.pool.num_evictions,
            }

    def progress(self) -> list[SequenceProgress]:
        """How far each unfinished sequence has come, in the order of arrival."""
        with self._entered():
            return [
                progress_of(completion.request)
                for group in self._groups.values()
                for completion in group.completions
                if not completion.request.finished
            ]

    def close(self) -> None:
        """Abort every request and close the device; safe to call again, also where it was broken off.

        Waits for a step that another thread is making. Raises :class:`RequestError` where a listener calls
        it within a step.
        """
        with self._lock.held():
            if self._busy:
                raise RequestError("the engine cannot be closed from within a step's own callback")
            self._closed = True
            try:
                self._unsure += 1  # no matter how what still runs will end
                self._left.extend(self._groups)
                self._catch_up()
            finally:
                self.device.close()

    def _requests(
        self, name: str, ids: list[int], params: SamplingParams, priority: int, cache_salt: str | None
    ) -> list[Request]:
        seed = self._seeds.next() if params.seed is None else params.seed
        max_tokens = self._door.max_tokens(params, len(ids))
        eos = self._door.eos_of(params)
        requests = [
            Request(name, i, ids, params, seed_of(seed, i), max_tokens, eos, priority, cache_salt)
            for i in range(params.n)
        ]
        requests[0].prompt_scores = self._door.prompt_scores(params, ids)
        return requests

    def _show(self, token: NewToken) -> None:
        """Hand a request's new token to its completion and its listener."""
        request = token.request
        if request.finished:  # a listener aborted it within this very step
            return
        group = self._groups[request.request_id]
        try:
            completion = group.completions[request.index]
            text, finish = completion.push(token.logprobs)
            self._counters["generation_tokens"] += 1
            if finish is not None:
                self._pipeline.scheduler.finish(request, *finish)
            if group.on_delta is not None:
                group.on_delta(completion.delta(text, num_tokens=1))
            if finish is not None:
                self._complete(group)
        except BaseException:
            # Half brought up to date, it must not go on: another thread may be waiting for it.
            group.ending = "error"
            raise

    def _complete(self, group: Group) -> None:
        """Hand out a group whose completions have all finished, once."""
        if not group.finished or self._groups.get(group.request_id) is not group:
            return
        output = group.output()
        aborted = any(completion.finish_reason in CUT_OFF for completion in output.outputs)
        del self._groups[group.request_id]
        self._counters["num_aborted" if aborted else "num_finished"] += 1
        if group.on_output is not None:
            group.on_output(output)
