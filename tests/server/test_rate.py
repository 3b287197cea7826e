"""How long those that find no room are told to wait."""

from __future__ import annotations

import pytest
from tests.server.gate import slowed
from tests.server.running import MakeServer

from loadproof.server.rate import Rate


class Clock:
    """One that goes on by ``step`` whenever it is looked at."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self._step = step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


def work(rate: Rate, clock: Clock, seconds: float, num: int) -> None:
    rate.set_busy(True)
    clock.now += seconds
    rate.set_busy(False)
    rate.count(num)


def test_nothing_is_known_at_first() -> None:
    assert Rate(Clock()).seconds_for(100) == 1


@pytest.mark.parametrize("idle", [0.0, 3600.0])
def test_idle_time_does_not_count(idle: float) -> None:
    clock = Clock()
    rate = Rate(clock)
    for _ in range(10):
        work(rate, clock, 0.25, 1)
        clock.now += idle
    assert rate.seconds_for(8) == 2


def test_work_without_an_end_counts() -> None:
    clock = Clock()
    rate = Rate(clock)
    rate.set_busy(True)
    for _ in range(3):
        clock.now += 10.0
        rate.set_busy(True)
        rate.count(1)
    assert rate.seconds_for(3) == 30


def test_a_wait_is_a_minute_at_most() -> None:
    clock = Clock()
    rate = Rate(clock)
    work(rate, clock, 1000.0, 1)
    assert rate.seconds_for(1) == 60


def test_an_idle_hour_does_not_make_the_wait_longer(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_server(max_num_seqs=1, max_queue=0, max_model_len=16000)
    clock = Clock(0.5)
    monkeypatch.setattr(served.app.state.server.engine, "_finishing", Rate(clock))
    http = served.http()
    for _ in range(4):
        assert http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200
        clock.now += 3600.0
    body = {"prompt": [1], "max_tokens": 15000, "ignore_eos": True, "stream": True}
    with slowed(served.llm), served.http().stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        refused = http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    served.check_no_leak()
