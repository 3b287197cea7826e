"""Steps from their plan to their results, some of them submitted ahead of the results before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from loadproof.devices.device import F32, Device, RowLogprobs, ScoreResult, SubmittedStep
from loadproof.engine.integrity import check_idle, check_integrity
from loadproof.engine.request import Request
from loadproof.engine.runner import Runner
from loadproof.engine.scheduler import Scheduler, SchedulerOptions
from loadproof.engine.step_plan import Chunk

LogitsHook = Callable[[str, int, int, "F32"], None]


@dataclass(frozen=True)
class PipelineOptions:
    """How steps follow each other; none of it changes an answer."""

    async_scheduling: bool = True
    """Plan and submit a step while the one before it runs."""
    check_integrity: bool = False
    """Check all bookkeeping after every step, not only when idle."""


class NewToken(NamedTuple):
    """A request's newest token, the last of its ``output_token_ids``, and its log-probabilities if wanted."""

    request: Request
    logprobs: RowLogprobs | None


@dataclass(frozen=True)
class StepReport:
    """What a step that ran has brought: rows computed, by request, and tokens, in the step's order."""

    chunks: list[Chunk]
    new_tokens: list[NewToken]


@dataclass(frozen=True)
class _Flight:
    chunks: list[Chunk]
    step: SubmittedStep


class Pipeline:
    """Owns the scheduler, and what has been submitted to the device and not come back.

    While a step runs, the next one is planned and submitted: it takes the tokens that the first one samples
    from the device's slots. Results come in order. ``on_logits``, where set, is called with (request id,
    completion index, position of the sampled token, raw logits ``[vocab_size]``) for each token that counts.
    """

    def __init__(
        self,
        device: Device,
        scheduling: SchedulerOptions | None = None,
        options: PipelineOptions | None = None,
    ) -> None:
        self.scheduler = Scheduler(device.limits, scheduling)
        self.on_logits: LogitsHook | None = None
        self.num_steps = 0
        self._options = options or PipelineOptions()
        self._depth = 2 if self._options.async_scheduling else 1
        self._device = device
        self._runner = Runner(device)
        self._flights: deque[_Flight] = deque()

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step has not come back."""
        return bool(self._flights) or self.scheduler.has_unfinished()

    def advance(self) -> StepReport | None:
        """Submit the next step, then wait for the oldest if as many as may be are on their way.

        Whatever this raises, :meth:`restart` must follow before anything else.
        """
        submitted = self._submit()
        report = None
        if self._flights and (not submitted or len(self._flights) == self._depth):
            report = self._collect()
        assert submitted or report is not None or not self.has_work(), "requests wait, and nothing moves"
        if self._options.check_integrity:
            check_integrity(self.scheduler, self._depth)
        return report

    def restart(self, requests: Sequence[Request]) -> None:
        """Begin again after a failure at any point, with these unfinished requests and their known tokens.

        Nothing that was on its way counts, nor anything in the cache. The device comes to its end first.
        Where this is interrupted it can be done again: a step may still run then, but whatever follows it
        runs after it.
        """
        while self._flights:
            # What failed has been raised; what ran doesn't count without it.
            with suppress(Exception):
                self._flights.popleft().step.result()
        self.scheduler.restart(requests)

    def settle(self) -> None:
        """Once no request is left, wait for what still runs on behalf of those that have finished."""
        assert not self.scheduler.has_unfinished()
        while self._flights:
            self._collect()
        check_idle(self.scheduler)

    def _submit(self) -> bool:
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        batch = self._runner.prepare(chunks, return_logits=self.on_logits is not None)
        self._flights.append(_Flight(chunks, self._device.submit(batch)))
        return True

    def _collect(self) -> StepReport:
        """Wait for the oldest step, and bring every request in it up to date."""
        flight = self._flights[0]
        result = flight.step.result()
        sampling = [chunk for chunk in flight.chunks if chunk.samples]
        assert len(result.token_ids) == len(result.logprobs) == len(sampling)
        hook = self.on_logits  # it may be removed meanwhile, by itself or by another thread
        if hook is not None and result.logits is not None:
            for chunk, logits in zip(sampling, result.logits, strict=True):
                if not chunk.request.finished:
                    hook(chunk.request.request_id, chunk.request.index, chunk.stop, logits)
        self._flights.popleft()
        self.num_steps += 1
        self._runner.record(sampling, result.token_ids)
        rows = iter(zip(result.token_ids.tolist(), result.logprobs, strict=True))
        scores = _divided(result.scores, flight.chunks)
        new_tokens = []
        for chunk in flight.chunks:
            token_id, logprobs = next(rows) if chunk.samples else (None, None)
            scored = next(scores) if chunk.scored is not None else None
            if self.scheduler.retire(chunk, token_id, scored):
                new_tokens.append(NewToken(chunk.request, logprobs))
        return StepReport(flight.chunks, new_tokens)


def _divided(scores: ScoreResult | None, chunks: list[Chunk]) -> Iterator[ScoreResult]:
    """The scores of each chunk that scores, in their order."""
    at = tops_at = 0
    for chunk in chunks:
        if chunk.scored is None:
            continue
        assert scores is not None
        assert chunk.request.prompt_scores is not None
        end = at + len(chunk.scored)
        tops_end = tops_at + len(chunk.scored) * chunk.request.prompt_scores.num_top
        yield ScoreResult(
            scores.logprobs[at:end],
            scores.ranks[at:end],
            scores.top_ids[tops_at:tops_end],
            scores.top_logprobs[tops_at:tops_end],
        )
        at, tops_at = end, tops_end
