"""Steps one ahead of their results: the same answers, and nothing left behind whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.fake_device import EOS, FakeDevice, FakeStep, byte_tokenizer, small_limits

from loadproof import CompletionDelta, RequestOutput, SamplingParams
from loadproof.devices.device import StepResult
from loadproof.engine.engine import Engine
from loadproof.engine.pipeline import Pipeline, PipelineOptions
from loadproof.engine.request import Request
from loadproof.engine.scheduler import SchedulerOptions

TOKENIZER = byte_tokenizer()
(X,) = TOKENIZER.encode("x")
FORCE = 100.0
CHECKED = PipelineOptions(check_integrity=True)

KINDS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 9, "ignore_eos": True},
    "end of sequence": {"logit_bias": {EOS: 4.0}},
    "stop token": {"stop_token_ids": list(range(0, 256, 9))},
    "stop string": {"logit_bias": {X: 12.0}, "stop": ["xx", "yz"]},
    "least length": {"min_tokens": 8, "stop_token_ids": list(range(0, 256, 2))},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    "one token": {"max_tokens": 1},
    "several": {"n": 3, "max_tokens": 8},
    "greedy": {"temperature": 0},
    "logprobs": {"logprobs": 2},
}


def engine_of(device: FakeDevice, *, ahead: bool = True, caching: bool = True) -> Engine:
    return Engine(
        device,
        TOKENIZER,
        scheduling=SchedulerOptions(enable_prefix_caching=caching),
        pipeline=PipelineOptions(async_scheduling=ahead, check_integrity=True),
    )


def ask(engine: Engine, into: dict[str, RequestOutput], name: str, **hooks: Any) -> None:
    """Queue the request of a kind, under its name."""
    prompt = [len(name), *range(20)]
    params = SamplingParams(**{"seed": len(name), "max_tokens": 30, **KINDS[name]})

    def receive(output: RequestOutput) -> None:
        into[output.request_id] = output

    engine.add_request(prompt, params, request_id=name, on_output=receive, **hooks)


def drain(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert (stats["num_free_blocks"], stats["num_running"]) == (stats["num_blocks"], 0)


def answers(engine: Engine, *names: str) -> dict[str, Any]:
    found: dict[str, RequestOutput] = {}
    for name in names:
        ask(engine, found, name)
    drain(engine)
    return {name: output.outputs for name, output in found.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Each kind's answer, by itself and with every step waited for."""
    found: dict[str, Any] = {}
    for name in KINDS:
        found |= answers(engine_of(FakeDevice(), ahead=False, caching=False), name)
    return found


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("num_blocks", [8, 12, 64])
def test_steps_ahead_of_their_results_change_no_answer(
    alone: dict[str, Any], ahead: bool, budget: int, num_blocks: int
) -> None:
    device = FakeDevice(small_limits(max_num_batched_tokens=budget, num_blocks=num_blocks))
    assert answers(engine_of(device, ahead=ahead), *KINDS) == alone
    assert (device.num_carried > 0) is ahead


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_alone_with_a_step_in_flight(alone: dict[str, Any], name: str) -> None:
    assert answers(engine_of(FakeDevice()), name)[name] == alone[name]


def test_kinds_end_as_they_are_meant_to(alone: dict[str, Any]) -> None:
    ends = {name: (one[0].finish_reason, one[0].stop_reason) for name, one in alone.items()}
    assert ends["length"] == ("length", None)
    assert ends["end of sequence"] == ("stop", None)
    assert ends["stop token"][0] == "stop"
    assert ends["stop token"][1] in range(0, 256, 9)
    assert ends["stop string"][1] in ("xx", "yz")
    assert len(alone["least length"][0].token_ids) > 8


def test_one_step_is_submitted_while_one_runs() -> None:
    device = Watched()
    engine = engine_of(device)
    ask(engine, {}, "length")
    drain(engine)
    assert device.most_in_flight == 2
    device = Watched()
    engine = engine_of(device, ahead=False)
    ask(engine, {}, "length")
    drain(engine)
    assert (device.most_in_flight, device.num_carried) == (1, 0)


class Watched(FakeDevice):
    """Counts the steps that have been submitted and not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_in_flight = self.most_in_flight = 0

    def submit(self, batch: Any) -> FakeStep:
        step = super().submit(batch)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return step

    def run_until(self, step: FakeStep) -> None:
        self.num_in_flight -= 1
        super().run_until(step)


def test_blocks_are_freed_only_once_no_step_can_touch_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(small_limits(num_blocks=8))
    engine = engine_of(device)
    pool = engine._pipeline.scheduler.pool
    release = pool.release
    released: list[int] = []

    def watched(blocks: list[int]) -> None:
        in_flight = {
            int(block)
            for step in device._waiting
            for length, table in zip(step.batch.seq_lens, step.batch.block_tables, strict=True)
            for block in table[: -(-int(length) // 16)]
        }
        freed = {block for block in blocks if pool.num_holders(block) == 1}
        assert not freed & in_flight
        released.extend(blocks)
        release(blocks)

    monkeypatch.setattr(pool, "release", watched)
    for index in range(7):
        params = SamplingParams(seed=index, max_tokens=40 + index, ignore_eos=True)
        engine.add_request([index, *range(20)], params, request_id=str(index))
    for _ in range(6):
        engine.step()
    engine.abort_request("0")
    drain(engine)
    assert released
    assert engine.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("num_steps", range(6))
def test_aborting_the_last_request_takes_everything_back(num_steps: int) -> None:
    device = FakeDevice()
    engine = engine_of(device)
    found: dict[str, RequestOutput] = {}
    ask(engine, found, "length")
    for _ in range(num_steps):
        engine.step()
    assert engine.abort_request("length")
    assert found["length"].outputs[0].finish_reason == "abort"
    assert not device._waiting, "no step is left to nobody"
    assert not engine._pipeline.has_work()
    assert engine.stats()["num_free_blocks"] == engine.stats()["num_blocks"]


def test_abort_with_a_step_in_flight_leaves_others_exact(alone: dict[str, Any]) -> None:
    for victim in ("greedy", "several", "length"):
        for when in (1, 2, 5):
            found: dict[str, RequestOutput] = {}
            engine = engine_of(FakeDevice(small_limits(num_blocks=12)))
            for name in KINDS:
                ask(engine, found, name)
            for _ in range(when):
                engine.step()
            engine.abort_request(victim)
            drain(engine)
            del found[victim]
            assert {name: output.outputs for name, output in found.items()} == {
                name: one for name, one in alone.items() if name != victim
            }


class Failing(FakeDevice):
    """Raises an error from a step's submission, its run or the wait for it, at a given one."""

    def __init__(self, where: str, at: int, error: BaseException) -> None:
        super().__init__(small_limits(max_num_batched_tokens=24, num_blocks=12))
        self.where, self.at, self.error = where, at, error
        self.counts = {"submit": 0, "run": 0, "wait": 0}

    def submit(self, batch: Any) -> FakeStep:
        self.fail("submit")
        step = super().submit(batch)
        result = step.result

        def waited() -> StepResult:
            self.fail("wait")
            return result()

        step.result = waited  # type: ignore[method-assign]
        return step

    def _run(self, submitted: Any) -> StepResult:
        self._last_tokens, kept = {}, self._last_tokens
        self.fail("run")
        self._last_tokens = kept
        return super()._run(submitted)

    def fail(self, where: str) -> None:
        self.counts[where] += 1
        if where == self.where and self.counts[where] == self.at:
            raise self.error


FAILURES = [
    ("submit", RuntimeError),
    ("run", RuntimeError),
    ("wait", RuntimeError),
    ("wait", KeyboardInterrupt),
]


@pytest.mark.parametrize("at", [1, 2, 3, 6, 15])
@pytest.mark.parametrize(("where", "kind"), FAILURES)
def test_all_go_on_exactly_after_a_step_that_failed(
    alone: dict[str, Any], where: str, kind: type[BaseException], at: int
) -> None:
    device = Failing(where, at, kind("it failed"))
    engine = engine_of(device)
    found: dict[str, RequestOutput] = {}
    for name in KINDS:
        ask(engine, found, name)
    with pytest.raises(kind, match="it failed"):
        drain(engine)
    drain(engine)
    assert {name: output.outputs for name, output in found.items()} == alone


def test_a_second_interrupt_while_beginning_anew_leaves_all_exact(alone: dict[str, Any]) -> None:
    for at in (2, 3, 4, 9):
        device = Failing("wait", at, KeyboardInterrupt("once"))
        engine = engine_of(device)
        found: dict[str, RequestOutput] = {}
        for name in KINDS:
            ask(engine, found, name)
        fail = device.fail

        def again(where: str, device: Failing = device, fail: Callable[[str], None] = fail) -> None:
            if where == "wait" and device.counts["wait"] == device.at:
                device.counts["wait"] += 1
                raise KeyboardInterrupt("twice")
            fail(where)

        device.fail = again  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt, match="twice"):
            drain(engine)
        drain(engine)
        assert {name: output.outputs for name, output in found.items()} == alone


class FailsOnce:
    """A hook or listener whose n-th call fails."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.num_calls, self.at, self.error = 0, at, error

    def __call__(self, *_: object) -> None:
        self.num_calls += 1
        if self.num_calls == self.at:
            raise self.error


@pytest.mark.parametrize("at", [1, 2, 5, 9, 30])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_all_go_on_exactly_after_a_hook_that_failed(
    alone: dict[str, Any], kind: type[BaseException], at: int
) -> None:
    engine = engine_of(FakeDevice(small_limits(num_blocks=12)))
    found: dict[str, RequestOutput] = {}
    for name in KINDS:
        ask(engine, found, name)
    engine.on_logits = FailsOnce(at, kind("it failed"))
    with pytest.raises(kind, match="it failed"):
        drain(engine)
    engine.on_logits = None
    drain(engine)
    assert {name: output.outputs for name, output in found.items()} == alone


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("victim", ["greedy", "several"])
def test_a_listener_that_fails_harms_its_own_request_only(
    alone: dict[str, Any], victim: str, kind: type[BaseException], at: int
) -> None:
    engine = engine_of(FakeDevice())
    found: dict[str, RequestOutput] = {}
    for name in KINDS:
        hooks = {"on_delta": FailsOnce(at, kind("it failed"))} if name == victim else {}
        ask(engine, found, name, **hooks)
    with pytest.raises(kind, match="it failed"):
        drain(engine)
    drain(engine)
    assert {one.finish_reason for one in found.pop(victim).outputs} <= {"error", "length", "stop"}
    assert {name: output.outputs for name, output in found.items()} == {
        name: one for name, one in alone.items() if name != victim
    }


@pytest.mark.parametrize("n", [1, 3])
def test_a_listener_that_always_fails_leaves_nothing_behind(n: int) -> None:
    engine = engine_of(FakeDevice())
    outputs: list[RequestOutput] = []

    def fail(delta: CompletionDelta) -> None:
        raise RuntimeError("it failed")

    params = SamplingParams(n=n, max_tokens=9, ignore_eos=True)
    engine.add_request([1], params, request_id="a", on_delta=fail, on_output=outputs.append)
    with pytest.raises(RuntimeError, match="it failed"):
        drain(engine)
    drain(engine)
    assert len(outputs) == 1
    assert engine.stats()["num_aborted"] == 1
    assert not engine.abort_request("a"), "its name is free again"


def test_a_pipeline_without_requests_has_nothing_to_do() -> None:
    pipeline = Pipeline(FakeDevice(), options=CHECKED)
    assert not pipeline.has_work()
    assert pipeline.advance() is None
    pipeline.settle()
    pipeline.restart(())
    assert pipeline.num_steps == 0


def test_a_report_tells_chunks_and_tokens_in_the_steps_order() -> None:
    pipeline = Pipeline(FakeDevice(small_limits(max_num_batched_tokens=8)), options=CHECKED)
    requests = [Request(name, 0, [1] * 6, SamplingParams(), 0, 9, frozenset()) for name in "ab"]
    for request in requests:
        pipeline.scheduler.add(request)
    assert pipeline.advance() is None, "the second step is submitted before the first is waited for"
    report = pipeline.advance()
    assert report is not None
    assert [(chunk.request.request_id, chunk.num_tokens) for chunk in report.chunks] == [("a", 6), ("b", 2)]
    assert [token.request.request_id for token in report.new_tokens] == ["a"]
    assert len(requests[0].output_token_ids) == 1
