"""The engine: requests go in, each step moves all of them on, outputs come out by callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadproof.engine.admission import ClosedError, Door, RequestError
from loadproof.engine.completion import Completion
from loadproof.engine.lock import FairLock
from loadproof.engine.output import CompletionDelta, RequestOutput
from loadproof.engine.request import Request
from loadproof.engine.runner import Runner
from loadproof.engine.sampling_params import SamplingParams
from loadproof.engine.scheduler import Chunk, Scheduler
from loadproof.engine.seeds import SeedSource, seed_of

if TYPE_CHECKING:
    from loadproof.devices.device import F32, Device, StepResult
    from loadproof.tokenizer.tokenizer import Tokenizer

LogitsHook = Callable[[str, int, int, "F32"], None]


@dataclass(eq=False, slots=True)
class _Group:
    """A caller's request: its completions, and whom to tell about them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    on_delta: Callable[[CompletionDelta], None] | None
    on_output: Callable[[RequestOutput], None] | None

    @property
    def finished(self) -> bool:
        return all(completion.request.finished for completion in self.completions)

    def output(self) -> RequestOutput:
        outputs = [completion.output() for completion in self.completions]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, 0, True)


class Engine:
    """Serves any number of requests on one device; any number of threads may call it.

    Owns the device from construction to :meth:`close`. Listeners are called by whichever thread makes the
    step, holding the engine's lock; they may add and abort requests, but neither step nor close.
    ``on_logits``, where set, is called with (request id, completion index, position of the sampled token,
    raw logits ``[vocab_size]``) for every token, before anybody sees that: a hook for exactness tests and
    tools.
    """

    def __init__(
        self, device: Device, tokenizer: Tokenizer, *, seed: int | None = None, max_logprobs: int = 20
    ) -> None:
        limits = device.limits
        # A tokenizer may name tokens beyond the model's vocabulary: those are never sampled.
        eos = frozenset(token_id for token_id in tokenizer.eos_token_ids if token_id < device.vocab_size)
        self.device = device
        self.tokenizer = tokenizer
        self.on_logits: LogitsHook | None = None
        self._door = Door(device.vocab_size, limits.max_model_len, max_logprobs, eos)
        self._scheduler = Scheduler(limits)
        self._runner = Runner(device)
        self._seeds = SeedSource(seed)
        self._groups: dict[str, _Group] = {}
        self._lock = FairLock()
        self._stepping = False
        self._closed = False
        self._counters = dict.fromkeys(
            (
                "num_requests",
                "num_finished",
                "num_aborted",
                "num_steps",
                "prompt_tokens",
                "generation_tokens",
            ),
            0,
        )

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep other threads out of the engine for several calls."""
        return self._lock.held()

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        on_delta: Callable[[CompletionDelta], None] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> str:
        """Queue a request and return its id; nothing is queued where it raises :class:`RequestError`.

        Within later steps ``on_delta`` gets each new token of each completion, and ``on_output`` the whole
        when all have finished or the request was aborted.
        """
        ids = self._door.check_prompt(prompt_token_ids)
        self._door.check_params(params)
        with self._lock.held():
            return self._add(ids, params, prompt, request_id, on_delta, on_output)

    def _add(
        self,
        ids: list[int],
        params: SamplingParams,
        prompt: str | None,
        request_id: str | None,
        on_delta: Callable[[CompletionDelta], None] | None,
        on_output: Callable[[RequestOutput], None] | None,
    ) -> str:
        if self._closed:
            raise ClosedError("the engine is closed")
        name = str(self._counters["num_requests"]) if request_id is None else request_id
        if name in self._groups:
            raise RequestError(f"request id {name!r} is in use")
        requests = self._requests(name, ids, params)
        completions = [Completion(request, self.tokenizer) for request in requests]
        self._groups[name] = _Group(name, prompt, ids, completions, on_delta, on_output)
        for request in requests:
            self._scheduler.add(request)
        self._counters["num_requests"] += 1
        return name

    def abort_request(self, request_id: str) -> bool:
        """End a request and free what it holds; its listener gets what there is. False if it is unknown."""
        with self._lock.held():
            return self._abort(request_id)

    def _abort(self, request_id: str) -> bool:
        group = self._groups.get(request_id)
        if group is None:
            return False
        for completion in group.completions:
            if not completion.request.finished:
                self._scheduler.finish(completion.request, "abort")
                text = completion.abort()
                if group.on_delta is not None:
                    group.on_delta(completion.delta(text, num_tokens=0))
        self._complete(group)
        return True

    def has_unfinished(self) -> bool:
        """Whether another step has work."""
        with self._lock.held():
            return self._scheduler.has_unfinished()

    def step(self) -> None:
        """Move every request on as far as one step's token budget goes. Does nothing without requests.

        Raises :class:`RequestError` where a listener calls it: the step that called that is not over.
        """
        with self._lock.held():
            if self._stepping:
                raise RequestError("no step, and so no generate, from within a step's own callback")
            self._stepping = True
            try:
                self._step()
            finally:
                self._stepping = False

    def _step(self) -> None:
        if not self._scheduler.has_unfinished():
            return
        chunks = self._scheduler.schedule()
        result = self._runner.run(chunks, return_logits=self.on_logits is not None)
        self._postprocess(chunks, result)
        if not self._scheduler.has_unfinished():
            self._scheduler.check_idle()

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is running now."""
        scheduler = self._scheduler
        with self._lock.held():
            return {
                **self._counters,
                "num_running": len(scheduler.running),
                "num_waiting": len(scheduler.waiting),
                "num_sat_out_steps": scheduler.num_sat_out_steps,
                "num_blocks": scheduler.pool.num_blocks,
                "num_free_blocks": scheduler.pool.num_free_blocks,
            }

    def close(self) -> None:
        """Abort every request and close the device; safe to call again.

        Waits for a step that another thread is making. Raises :class:`RequestError` where a listener calls
        it within a step.
        """
        with self._lock.held():
            if self._closed:
                return
            if self._stepping:
                raise RequestError("the engine cannot be closed from within a step's own callback")
            self._closed = True
            for request_id in list(self._groups):
                self._abort(request_id)
            self.device.close()

    def _requests(self, name: str, ids: list[int], params: SamplingParams) -> list[Request]:
        seed = self._seeds.next() if params.seed is None else params.seed
        max_tokens = self._door.max_tokens(params, len(ids))
        eos = self._door.eos_of(params)
        return [Request(name, i, ids, params, seed_of(seed, i), max_tokens, eos) for i in range(params.n)]

    def _postprocess(self, chunks: list[Chunk], result: StepResult) -> None:
        """Bring every request up to date with a step that ran, and tell the listeners."""
        self._counters["num_steps"] += 1
        token_ids = result.token_ids.tolist()
        row = 0
        for chunk in chunks:
            this, row = row, row + chunk.samples
            if chunk.samples:
                self._show_logits(chunk.request, result, this)
            if chunk.request.finished:  # a listener aborted it within this very step
                continue
            try:
                self._count(chunk)
                self._scheduler.advance(chunk, token_ids[this] if chunk.samples else None)
                if chunk.samples:
                    self._show(chunk.request, result, this)
            except BaseException:
                # Half brought up to date, it must not go on: another thread may be waiting for it.
                self._abort(chunk.request.request_id)
                raise

    def _show_logits(self, request: Request, result: StepResult, row: int) -> None:
        # Before the request moves on: where the hook fails, the next step computes the same row again.
        if self.on_logits is not None and result.logits is not None and not request.finished:
            self.on_logits(request.request_id, request.index, request.num_tokens, result.logits[row])

    def _count(self, chunk: Chunk) -> None:
        request = chunk.request
        prompt_left = request.num_prompt_tokens - request.num_computed_tokens
        if prompt_left > 0:
            self._counters["prompt_tokens"] += min(chunk.num_tokens, prompt_left)
        self._counters["generation_tokens"] += chunk.samples

    def _show(self, request: Request, result: StepResult, row: int) -> None:
        """Hand a request's new token, row ``row`` of the result, to its completion and its listener."""
        group = self._groups[request.request_id]
        completion = group.completions[request.index]
        text, finish = completion.push(result.logprobs[row])
        if finish is not None:
            self._scheduler.finish(request, *finish)
        if group.on_delta is not None:
            group.on_delta(completion.delta(text, num_tokens=1))
        if finish is not None:
            self._complete(group)

    def _complete(self, group: _Group) -> None:
        """Hand out a group whose completions have all finished, once."""
        if not group.finished or self._groups.get(group.request_id) is not group:
            return
        del self._groups[group.request_id]
        output = group.output()
        aborted = any(completion.finish_reason == "abort" for completion in output.outputs)
        self._counters["num_aborted" if aborted else "num_finished"] += 1
        if group.on_output is not None:
            group.on_output(output)
