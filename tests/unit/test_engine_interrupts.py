"""Interrupts at any place of what changes the engine's books, and of what mends them."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fake_device import FakeDevice, byte_tokenizer, fake_loader, small_limits
from tests.interrupts import Interrupt

from loadproof import LLM, RequestOutput, SamplingParams
from loadproof.engine.engine import Engine
from loadproof.engine.pipeline import PipelineOptions
from loadproof.engine.scheduler import Scheduler

# Interrupted once more while Python tidies up after an interrupt, a call may end without an error.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LIMITS = small_limits(max_num_batched_tokens=24, max_num_seqs=2, num_blocks=10)
TOKENIZER = byte_tokenizer()
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
LONG, SHORT = list(range(60)), [5, 6, 7]
PROMPTS = [LONG, SHORT, [*LONG[:40], 9], SHORT]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr("loadproof.llm.load_model", fake_loader(limits=LIMITS))
    with LLM("fake", check_integrity=True) as loaded:
        yield loaded


def engine_with(**found: list[RequestOutput]) -> Engine:
    """Has a request of each name, for the long prompt, whose output is put there."""
    engine = Engine(FakeDevice(LIMITS), TOKENIZER, pipeline=PipelineOptions(check_integrity=True))
    for name, outputs in found.items():
        engine.add_request(LONG, PARAMS, request_id=name, on_output=outputs.append)
    return engine


def answers(outputs: list[RequestOutput]) -> list[tuple[list[int], list[Any]]]:
    return [(output.outputs[0].token_ids, list(output.prompt_logprobs or ())) for output in outputs]


def confirm_idle(engine: Engine) -> None:
    assert not engine.has_unfinished()
    assert not engine._groups
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert not engine._pipeline.has_work()


@pytest.mark.parametrize("at", [1, 7])
def test_a_second_interrupt_at_any_place_of_the_recovery(llm: LLM, at: int) -> None:
    """Of the step, and of the call's own cleaning up."""
    expected = answers(llm.generate(PROMPTS, PARAMS))
    for place in itertools.count(1):
        second = Interrupt(place)
        tokens = itertools.count(1)

        def first(*_: object, second: Interrupt = second, tokens: Iterator[int] = tokens) -> None:
            if next(tokens) == at:
                second.arm()
                raise KeyboardInterrupt

        llm.on_logits(first)
        second.within(lambda: llm.generate(PROMPTS, PARAMS))
        llm.on_logits(None)
        confirm_idle(llm.engine)
        assert answers(llm.generate(PROMPTS, PARAMS)) == expected, place
        if not second.came:
            break
    assert place > 50


@pytest.mark.parametrize(("victim", "num_steps"), [("a", 0), ("b", 2), ("a", 2), ("a", 4)])
def test_an_interrupt_at_any_place_of_an_abort(victim: str, num_steps: int) -> None:
    """Of a request that waits, that is parked, in the middle of its prompt, and while it decodes."""
    alone: list[RequestOutput] = []
    engine = engine_with(a=alone)
    while engine.has_unfinished():
        engine.step()
    for place in itertools.count(1):
        found: dict[str, list[RequestOutput]] = {"a": [], "b": []}
        engine = engine_with(**found)
        for _ in range(num_steps):
            engine.step()
        interrupt = Interrupt(place)
        interrupt.arm()
        interrupt.within(lambda engine=engine: engine.abort_request(victim))  # type: ignore[misc]
        while engine.has_unfinished():
            if not engine.stats()["num_aborted"]:  # it came before the request was known to be aborted
                assert engine.abort_request(victim)
            engine.step()
        assert engine.stats()["num_aborted"] == 1, place
        (other,) = found.keys() - {victim}
        assert answers(found[other]) == answers(alone), place
        assert [output.outputs[0].finish_reason for output in found[victim]] in (["abort"], []), place
        confirm_idle(engine)
        if not interrupt.came:
            break
    assert found[victim], "without an interrupt its listener is told"
    assert place > 20


def test_an_abort_that_was_interrupted_takes_place() -> None:
    outputs: list[RequestOutput] = []
    engine = engine_with(a=outputs)
    engine.step()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.abort_request("a")
    assert not engine.has_unfinished()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
    confirm_idle(engine)


def test_an_interrupt_at_any_place_of_forgetting_the_cache(llm: LLM) -> None:
    expected = answers(llm.generate(PROMPTS, PARAMS))
    for place in itertools.count(1):
        interrupt = Interrupt(place)
        interrupt.arm()
        interrupt.within(llm.reset_prefix_cache)
        confirm_idle(llm.engine)
        llm.engine._pipeline.scheduler.pool.check_integrity()
        assert answers(llm.generate(PROMPTS, PARAMS)) == expected, place
        if not interrupt.came:
            break
    assert place > 10


@pytest.mark.parametrize("kind", ["generate", "stream"])
def test_an_interrupt_at_any_place_from_queuing_a_request_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Until the first step: within adding, as that is left, and before the call knows of it."""
    add = Scheduler.add
    for place in itertools.count(1):
        interrupt = Interrupt(place)
        came: list[bool] = []

        def armed(*args: Any, interrupt: Interrupt = interrupt) -> None:
            interrupt.arm()
            add(*args)

        def stepped(_: LLM, __: object, interrupt: Interrupt = interrupt, came: list[bool] = came) -> None:
            interrupt.disarm()
            came.append(interrupt.came)
            raise KeyboardInterrupt

        monkeypatch.setattr(Scheduler, "add", armed)
        monkeypatch.setattr(LLM, "_step_until", stepped)
        if kind == "generate":
            interrupt.within(lambda: llm.generate([SHORT], PARAMS))
        else:
            interrupt.within(lambda: next(llm.stream(SHORT, PARAMS)))
        monkeypatch.undo()
        confirm_idle(llm.engine)
        if came == [False]:
            break
    assert place > 5


def test_an_interrupt_at_any_place_of_closing() -> None:
    for place in itertools.count(1):
        outputs: list[RequestOutput] = []
        engine = engine_with(a=outputs, b=[])
        for _ in range(3):
            engine.step()
        interrupt = Interrupt(place)
        interrupt.arm()
        interrupt.within(engine.close)
        engine.close()
        assert isinstance(engine.device, FakeDevice)
        assert engine.device.closed, place
        confirm_idle(engine)
        if not interrupt.came:
            break
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
    assert place > 30


def test_a_listener_that_fails_each_time_it_hears_of_an_abort_ends_it_all_the_same() -> None:
    """By the next call; it is told once."""
    engine = engine_with()
    outputs: list[RequestOutput] = []

    def fail(_: object) -> None:
        raise RuntimeError("it failed")

    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True)
    engine.add_request(SHORT, params, request_id="a", on_delta=fail, on_output=outputs.append)
    with pytest.raises(RuntimeError, match="it failed"):
        engine.abort_request("a")
    confirm_idle(engine)
    assert [one.finish_reason for one in outputs[0].outputs] == ["abort"] * 3


@pytest.mark.parametrize("num_steps", [0, 2, 30])
def test_an_idle_engine_remembers_no_request(num_steps: int) -> None:
    """Whether it was aborted while it waited or computed, or came to its end."""
    engine = engine_with(a=[])
    scores = weakref.ref(engine._groups["a"].completions[0].request.prompt_scores)
    for _ in range(num_steps):
        engine.step()
    assert engine.abort_request("a") is (num_steps < 30)
    gc.collect()
    assert scores() is None
