"""One model used by several threads at once: each gets what it would get alone."""

from __future__ import annotations

import dis
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.fake_device import FakeDevice, FakeStep, fake_loader
from tests.tiny_models import write_model

from loadproof import LLM, SamplingParams
from loadproof.engine import lock as lock_module
from loadproof.engine.admission import RequestError
from loadproof.engine.completion import Completion
from loadproof.engine.lock import FairLock
from loadproof.engine.scheduler import Scheduler
from loadproof.llm import InterruptedCallError

NUM_THREADS = 4
ROUNDS = 5
PATIENCE = 60.0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr("loadproof.llm.load_model", fake_loader())
    with LLM("fake") as llm:
        yield llm


@pytest.fixture
def native(tmp_path: Path) -> Iterator[LLM]:
    directory = write_model(tmp_path / "llama", "llama")
    with LLM(directory, num_blocks_override=64, num_threads=2, max_num_batched_tokens=32) as llm:
        yield llm


def _generate(llm: LLM, thread: int, turn: int) -> list[list[int]]:
    prompts = [[thread + 1, turn + 1, *range(2, 5 + 7 * place)] for place in range(3)]
    params = SamplingParams(seed=10 * thread + turn, max_tokens=12 + thread, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def _stream(llm: LLM, thread: int, turn: int) -> list[list[int]]:
    params = SamplingParams(seed=thread, n=2, max_tokens=10 + turn, ignore_eos=True)
    pieces: list[list[int]] = [[], []]
    for delta in llm.stream([thread + 1, turn + 2], params):
        pieces[delta.index] += delta.token_ids
    return pieces


def _chat(llm: LLM, thread: int, turn: int) -> list[list[int]]:
    messages = [{"role": "user", "content": f"tea for {thread} at {turn}"}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.chat(messages, params)]


CALLS: tuple[Callable[[LLM, int, int], list[list[int]]], ...] = (_generate, _stream, _chat, _generate)


@pytest.mark.parametrize("model", ["fake", "native"])
def test_each_thread_gets_what_it_gets_alone(model: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(model)

    def use(thread: int) -> list[list[list[int]]]:
        return [CALLS[(thread + turn) % len(CALLS)](llm, thread, turn) for turn in range(ROUNDS)]

    alone = [use(thread) for thread in range(NUM_THREADS)]
    steps_alone = llm.stats()["num_steps"]
    start = threading.Barrier(NUM_THREADS)

    def together(thread: int) -> list[list[list[int]]]:
        start.wait(PATIENCE)
        return use(thread)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert list(pool.map(together, range(NUM_THREADS), timeout=PATIENCE)) == alone
    stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_aborted"] == 0
    # They shared steps: the engine let a newcomer in while another thread was generating.
    assert stats["num_steps"] < 2 * steps_alone


class _Gated(FakeDevice):
    """Lets a test wait until a step is being computed, and holds that up until told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = threading.Event()
        self.go_on = threading.Event()

    def run_until(self, step: FakeStep) -> None:
        self.computing.set()
        assert self.go_on.wait(PATIENCE)
        super().run_until(step)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, _Gated]]:
    device = _Gated()
    monkeypatch.setattr("tests.fake_device.FakeDevice", lambda limits: device)
    monkeypatch.setattr("loadproof.llm.load_model", fake_loader())
    with LLM("fake") as llm:
        yield llm, device
        device.go_on.set()


LONG = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)


def test_closing_ends_what_other_threads_are_doing(gated: tuple[LLM, _Gated]) -> None:
    llm, device = gated
    with ThreadPoolExecutor(3) as pool:
        generating = pool.submit(llm.generate, [[1], [2]], LONG)
        assert device.computing.wait(PATIENCE)
        last = llm.engine._lock._last
        closing = pool.submit(llm.close)
        while llm.engine._lock._last is last:
            assert not closing.done()
        device.go_on.set()
        closing.result(PATIENCE)
        with pytest.raises(RequestError, match="closed while this call was being served"):
            generating.result(PATIENCE)
    assert device.closed
    with pytest.raises(RequestError, match="the engine is closed"):
        llm.generate([[1]], LONG)


def test_closing_ends_a_stream_with_an_error(gated: tuple[LLM, _Gated]) -> None:
    llm, device = gated
    device.go_on.set()
    stream = llm.stream([1], LONG)
    next(stream)
    llm.close()
    with pytest.raises(RequestError, match="closed while"):
        list(stream)


def test_a_hook_may_neither_close_nor_generate(gated: tuple[LLM, _Gated]) -> None:
    llm, device = gated
    device.go_on.set()
    expected = llm.generate([1], LONG)[0].outputs
    for act, message in ((llm.close, "cannot be closed"), (lambda: llm.generate([2], LONG), "no generate")):
        llm.on_logits(lambda *_, act=act: act())
        with pytest.raises(RequestError, match=message):
            llm.generate([1], LONG)
        llm.on_logits(None)
        assert llm.generate([1], LONG)[0].outputs == expected
    assert llm.stats()["num_running"] == 0


def test_a_failing_hook_leaves_the_requests_of_others_whole(native: LLM) -> None:
    llm = native
    expected = llm.generate([1, 2], LONG)[0].outputs
    stream = llm.stream([1, 2], LONG)
    pieces = [next(stream)]

    def fail(*_: object) -> None:
        raise RuntimeError("the hook failed")

    llm.on_logits(fail)
    with pytest.raises(RuntimeError, match="the hook failed"):
        llm.generate([3], LONG)
    llm.on_logits(None)
    pieces += stream
    assert "".join(piece.text for piece in pieces) == expected[0].text
    assert [token for piece in pieces for token in piece.token_ids] == expected[0].token_ids


def test_the_lock_is_taken_again_by_its_holder_and_handed_over() -> None:
    lock = FairLock()
    turns: list[str] = []

    def other() -> None:
        with lock.held():
            turns.append("other")

    with lock.held():
        last = lock._last
        thread = threading.Thread(target=other)
        thread.start()
        while lock._last is last:
            assert thread.is_alive()
        with lock.held():
            turns.append("again")
    with lock.held():
        turns.append("after")
    thread.join()
    assert turns == ["again", "other", "after"]


def _interrupted_at(lock: FairLock, n: int, interrupt: Callable[[], None]) -> bool:
    """Take the lock and let go of it, interrupted at the n-th place, from 1, if it has as many.

    Python looks for signals after calls and where a function begins or goes on.
    """
    count = 0
    before: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        nonlocal count
        if frame.f_code.co_filename != lock_module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = before.get(frame)
            before[frame] = frame.f_lasti
            if last is not None and dis.opname[frame.f_code.co_code[last]].startswith(("CALL", "RESUME")):
                count += 1
                if count == n:
                    interrupt()
        return trace

    outer = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing begins
    sys.settrace(trace)
    try:
        with lock.held():
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(outer)
    return count >= n


def _raise() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_at_any_place_lets_go_of_the_lock() -> None:
    lock = FairLock()
    place = 1
    while _interrupted_at(lock, place, _raise):
        assert not lock._is_holder(threading.get_ident()), place
        assert not lock._lock.locked(), place
        assert not lock._last.locked(), place
        place += 1
    assert place > 6


def test_what_runs_at_any_place_of_taking_the_lock_may_take_it_if_it_is_free() -> None:
    """As the garbage collector does: it waits for nothing, and is alone where it is told so."""
    lock = FairLock()
    found: list[bool] = []

    def collect() -> None:
        with lock.held_if_free() as is_held:
            assert lock._lock.locked()
            assert lock._is_holder(threading.get_ident()) or not is_held
            found.append(is_held)

    def take() -> None:
        place = 1
        while _interrupted_at(lock, place, collect):
            assert not lock._lock.locked(), place
            place += 1

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert set(found) == {True, False}


def test_a_call_whose_request_was_lost_says_so(native: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is interrupted while it tells of a token ends that token's request, whosever it is."""
    pushed = Completion.push
    stream = native.stream([1, 2], LONG)
    next(stream)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Completion, "push", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native.engine.step()
    monkeypatch.setattr(Completion, "push", pushed)
    with pytest.raises(InterruptedCallError):
        list(stream)
    assert len(native.generate([1], LONG)[0].outputs[0].token_ids) == 100


def test_what_a_hook_aborts_is_an_output_among_the_others(native: LLM) -> None:
    expected = native.generate([2], LONG)[0].outputs
    tokens: list[str] = []

    def abort(request_id: str, *_: object) -> None:
        tokens.append(request_id)
        if tokens.count(tokens[0]) > 3:
            native.engine.abort_request(tokens[0])

    native.on_logits(abort)
    first, second = native.generate([[1], [2]], LONG)
    native.on_logits(None)
    assert (first.outputs[0].finish_reason, len(first.outputs[0].token_ids)) == ("abort", 3)
    assert second.outputs == expected


class _Session:
    """Somebody's object that is in a cycle with its stream: only the garbage collector ends that."""

    def __init__(self, llm: LLM) -> None:
        self.myself = self
        self.pieces = llm.stream([1], LONG)
        next(self.pieces)


@pytest.mark.parametrize("where", ["step", "listener", "nowhere"])
def test_streams_that_are_dropped_end_wherever_the_collector_runs(
    native: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Within an engine's call they end with the next one."""
    expected = native.generate([1, 2], LONG)[0].outputs
    _Session(native)
    calls = itertools.count()

    def collect(*_: object) -> None:
        if next(calls) < 3:  # the first finds it; each takes long among the objects of all these tests
            gc.collect()

    if where == "step":
        plan = Scheduler.schedule

        def planned(self: Scheduler) -> object:
            collect()
            return plan(self)

        monkeypatch.setattr(Scheduler, "schedule", planned)
    elif where == "listener":
        native.on_logits(collect)
    else:
        collect()
        assert native.stats()["num_aborted"] == 1
    assert native.generate([1, 2], LONG)[0].outputs == expected
    native.on_logits(None)
    stats = native.stats()
    assert (stats["num_aborted"], stats["num_running"]) == (1, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]
