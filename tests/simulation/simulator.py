"""Runs one scenario on the real pipeline, as the engine would, and checks it to the end."""

from __future__ import annotations

from random import Random

from tests.simulation.device import Failure, InjectedFailureError, SimulatedDevice
from tests.simulation.model import Truth
from tests.simulation.scenario import Scenario, draw_scenario
from tests.simulation.scores import ViolationError
from tests.simulation.summary import Summary
from tests.simulation.watch import Watch, WatchedScheduler

from loadproof.engine.pipeline import Pipeline, StepReport
from loadproof.engine.request import Request, RequestStatus

FAILURES: tuple[Failure | None, ...] = ("submit", "run", None)  # None: a listener fails


class SimulationError(Exception):
    """A scenario failed: its seed, the step after which, and what."""

    def __init__(self, seed: int, step: int, reason: str) -> None:
        super().__init__(f"seed {seed}, step {step}: {reason}")
        self.seed = seed
        self.step = step
        self.reason = reason

    def __reduce__(self) -> tuple[type[SimulationError], tuple[int, int, str]]:
        return type(self), (self.seed, self.step, self.reason)  # to cross from one process to another


def simulate(seed: int) -> Summary:
    """Run the scenario of a seed; raises :class:`SimulationError` whatever goes wrong."""
    simulation = Simulation(seed)
    try:
        return simulation.run()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SimulationError(seed, simulation.num_steps, reason) from error


class Simulation:
    """One scenario. A tick is one turn of the engine's loop: new requests, aborts, a step, its tokens."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._scenario = scenario = draw_scenario(self._rng)
        self._watch = Watch(scenario.limits, scenario.scheduling, allowed_stall(scenario))
        self._device = SimulatedDevice(
            scenario.limits, Random(seed), scenario.eagerness, self._watch.before_run
        )
        self._pipeline = Pipeline(self._device, scenario.scheduling, scenario.pipeline)
        self._scheduler = WatchedScheduler(scenario.limits, scenario.scheduling, self._watch)
        self._pipeline.scheduler = self._scheduler
        self._watch.attach(self._scheduler, self._device)
        self._arrivals = list(reversed(scenario.arrivals))
        self._open: dict[Request, tuple[Truth, int]] = {}  # unfinished, and how many tokens were shown
        self._tick = 0
        self._num_turns = 0
        self._turns_allowed = allowed_turns(scenario)
        self._fails_listener = False

    @property
    def num_steps(self) -> int:
        """Steps submitted so far."""
        return self._watch.summary.steps

    def run(self) -> Summary:
        """Run to the end; raises what goes wrong."""
        while self._arrivals or self._pipeline.has_work():
            if not self._pipeline.has_work():
                self._tick = max(self._tick, self._arrivals[-1][0])
            self._arrive()
            self._disturb()
            self._turn()
            self._tick += 1
        if self._open:
            raise ViolationError(f"{len(self._open)} requests were lost")
        counters, summary = self._scheduler.counters, self._watch.summary
        summary.evictions = self._scheduler.pool.num_evictions
        summary.resumed_with_hits = counters.num_resumed_with_hits
        summary.sat_out_steps = counters.num_sat_out_steps
        summary.hit_tokens = counters.prefix_cache_hits
        if counters.num_preemptions < summary.preemptions:
            raise ViolationError(
                f"{summary.preemptions} preemptions seen, {counters.num_preemptions} counted"
            )
        return summary

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[-1][0] <= self._tick:
            truth = self._arrivals.pop()[1]
            self._scheduler.add(truth.request)
            self._watch.added(truth)
            self._open[truth.request] = (truth, 0)

    def _disturb(self) -> None:
        """What happens between steps, if anything does."""
        rng, scenario = self._rng, self._scenario
        self._device.dawdle()
        if rng.random() < scenario.abort_rate:
            self._abort_any()
        if rng.random() < scenario.reset_rate:
            self._scheduler.reset_prefix_cache()
            self._watch.generation += 1
            self._watch.summary.resets += 1
        if rng.random() < scenario.failure_rate:
            failure = rng.choice(FAILURES)
            self._device.failure = failure
            self._fails_listener = failure is None
        self._device.dawdle()

    def _turn(self) -> None:
        self._num_turns += 1
        if self._num_turns > self._turns_allowed:
            raise ViolationError(f"{self._num_turns} turns of the loop, {self._turns_allowed} must do")
        if not self._pipeline.has_work():
            return
        try:
            report = self._pipeline.advance()
            if report is not None:
                self._show(report)
        except InjectedFailureError:
            self._restart()
        self._watch.check_published()
        if not self._scheduler.has_unfinished():
            self._settle()

    def _settle(self) -> None:
        try:
            self._pipeline.settle()
        except InjectedFailureError:
            self._restart()

    def _show(self, report: StepReport) -> None:
        """Hand each new token to its listener, who may fail, or abort anything."""
        self._watch.summary.discarded_tokens += sum(chunk.samples for chunk in report.chunks)
        self._watch.summary.discarded_tokens -= len(report.new_tokens)
        for token in report.new_tokens:
            request = token.request
            if request.finished:
                continue
            truth, num_shown = self._open[request]
            if len(request.output_token_ids) != num_shown + 1:
                raise ViolationError(
                    f"{request.key}: tokens {request.output_token_ids}, {num_shown} shown before"
                )
            if request.output_token_ids[num_shown] != truth.output[num_shown]:
                raise ViolationError(
                    f"{request.key}: a wrong token at {num_shown}: {request.output_token_ids}"
                )
            if num_shown == 0:
                self._watch.check_scores(request, whole=True)
            if self._fails_listener:
                self._fails_listener = False
                self._abort(request)
                raise InjectedFailureError("a listener failed")
            self._open[request] = (truth, num_shown + 1)
            self._watch.summary.tokens += 1
            self._finish_if_done(truth, num_shown + 1)
            if self._rng.random() < self._scenario.abort_rate / 8:
                self._abort_any()

    def _finish_if_done(self, truth: Truth, num_output: int) -> None:
        request, summary = truth.request, self._watch.summary
        finish = request.token_finish() or (("stop", "cut") if num_output == truth.cut else None)
        if (finish is not None) != (num_output == truth.num_output):
            raise ViolationError(f"{request.key} ends with {finish} after {num_output} of {truth.num_output}")
        if finish is None:
            return
        if request.output_token_ids != truth.output or finish != truth.finish:
            raise ViolationError(f"{request.key} ends with {finish} and {request.output_token_ids}")
        summary.stopped_by_host += finish[1] == "cut"
        summary.stopped_by_token += finish[0] == "stop" and finish[1] != "cut"
        self._scheduler.finish(request, *finish)
        del self._open[request]

    def _abort_any(self) -> None:
        """Abort a request, mostly one that stands where aborting is delicate."""
        requests = list(self._open)
        kind = self._rng.randrange(4)
        if kind == 0:
            requests = [one for one in requests if one.status is RequestStatus.LEAVING] or requests
        elif kind == 1:
            requests = [one for one in requests if one.num_missing_tokens == 0] or requests
        elif kind == 2:
            requests = [one for one in requests if one.status is RequestStatus.WAITING] or requests
        if requests:
            self._abort(self._rng.choice(requests))

    def _abort(self, request: Request) -> None:
        summary = self._watch.summary
        summary.aborts_waiting += request.status is RequestStatus.WAITING
        summary.aborts_running += request.status is RequestStatus.RUNNING
        summary.aborts_in_last_step += request.num_missing_tokens == 0
        self._watch.check_scores(request, whole=False)
        self._scheduler.finish(request, "abort")
        del self._open[request]

    def _restart(self) -> None:
        """Go on from what the listeners know, as the engine does."""
        self._watch.summary.failures += 1
        self._turns_allowed += allowed_turns(self._scenario, again=True)
        for request, (_, num_shown) in self._open.items():
            del request.output_token_ids[num_shown:]
        self._pipeline.restart(list(self._open))
        self._device.recover()
        self._watch.restarted(list(self._open))


def allowed_stall(scenario: Scenario) -> int:
    """Turns of the loop for which the best-ranked unfinished request may be passed over.

    Without a step in flight whoever holds its blocks gives way at once, so there are none. With one, it may
    wait for its own last token, or for a step of those that gave way for it. What is free meanwhile is kept
    for it.
    """
    return 1 if scenario.pipeline.async_scheduling else 0


def allowed_turns(scenario: Scenario, again: bool = False) -> int:
    """Turns of the loop that are enough for all requests; those for one, the largest, with ``again``.

    Some request ranks best at any time. It is passed over for :func:`allowed_stall` turns at most before it
    moves on, by one token at least, its prompt by the share of the budget that prompts have while others
    decode, or that its prompt's scores move on by a budget. What it has computed is lost only where a better
    one arrives (priorities) or something fails; and each arrival or failure takes that from one request only.
    """
    budget = scenario.limits.max_num_batched_tokens
    share = min(scenario.scheduling.max_num_prefill_tokens, max(budget // 4, 1))
    costs = [
        -(-(request.num_prompt_tokens + request.max_tokens) // share)
        + (-(-request.num_prompt_tokens // budget) if request.prompt_scores is not None else 0)
        + request.max_tokens
        + 1
        for request in (truth.request for _, truth in scenario.arrivals)
    ]
    displaced = len(costs) if scenario.scheduling.policy == "priority" else 0
    total = max(costs) if again else sum(costs) + displaced * max(costs)
    return (allowed_stall(scenario) + 1) * total + (scenario.arrivals[-1][0] if not again else 0)
