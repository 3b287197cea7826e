"""The fix async-inputs: which token each decode row reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.fixes.engines import ASYNC, RIGHT, Engine, install
from tests.fixes.tensors import Tensor

STALE = 900  # what earlier steps left in the device's buffer: no request's own token


class Step:
    """A step of decodes: host tokens by request, and what the previous step sampled for whom."""

    def __init__(self, host: dict[str, list[int]], sampled: dict[str, int] | None) -> None:
        self.host = host
        flat = [token for tokens in host.values() for token in tokens]
        self.cpu = Tensor([*flat, *[0] * 8])
        self.hpu = Tensor(np.arange(STALE, STALE + len(flat) + 8))
        rows = {name: row for row, name in enumerate(sampled or {})}
        self.batch = SimpleNamespace(
            req_ids=list(host),
            prev_sampled_token_ids=None if sampled is None else Tensor(list(sampled.values())),
            prev_req_id_to_index=rows,
        )

    def rows(self, engine: Engine, is_async: bool = True, is_dummy: bool = False) -> list[list[int]]:
        """The tokens that each request's rows read, padding last."""
        runner: Any = engine.run()["HPUModelRunner"](self.batch, self.cpu, self.hpu, is_async)
        counts = [len(tokens) for tokens in self.host.values()]
        scheduled = SimpleNamespace(num_scheduled_tokens=dict(zip(self.host, counts, strict=True)))
        found = runner._create_decode_input_data(len(counts), counts, None if is_dummy else scheduled)
        rows: list[list[int]] = found.view(-1, max(counts)).tolist()
        return rows


# Host tokens by request; tokens that the previous step sampled; what the faulty engine reads; what is right.
# The host doesn't know the tokens of carried-over requests yet: -1.
ONE = {
    "all carried over": ({"a": [-1], "b": [-1]}, {"a": 31, "b": 32}, [[31], [32]], [[31], [32]]),
    "reordered": ({"b": [-1], "a": [-1]}, {"a": 31, "b": 32}, [[32], [31]], [[32], [31]]),
    "sat out": ({"a": [-1], "b": [52]}, {"a": 31}, [[31], [901]], [[31], [52]]),
    "resumed, first row": ({"b": [52], "a": [-1]}, {"a": 31}, [[900], [31]], [[52], [31]]),
    "token discarded": (
        {"a": [-1], "b": [52], "c": [-1]},
        {"a": 31, "c": 33},
        [[31], [901], [33]],
        [[31], [52], [33]],
    ),
    "none carried over": ({"a": [51], "b": [52]}, {"x": 39}, [[900], [901]], [[51], [52]]),
    "no previous step": ({"a": [51], "b": [52]}, None, [[900], [901]], [[51], [52]]),
    "another left": ({"b": [-1]}, {"a": 31, "b": 32}, [[32]], [[32]]),
}
SEVERAL = {
    "sat out": (
        {"a": [7, -1], "b": [52, 53, 54], "c": [-1]},
        {"a": 31, "c": 33},
        [[900, 31, 0], [902, 903, 904], [33, 0, 0]],
        [[7, 31, 0], [52, 53, 54], [33, 0, 0]],
    ),
    "none carried over": (
        {"a": [51], "b": [52, 53]},
        {"x": 39},
        [[900, 0], [901, 902]],
        [[51, 0], [52, 53]],
    ),
}
CASES = {
    **{f"one token: {case}": ONE[case] for case in ONE},
    **{f"several: {case}": SEVERAL[case] for case in SEVERAL},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_read_their_own_tokens(tmp_path: Path, case: str) -> None:
    host, sampled, faulty, right = CASES[case]
    engine = install(tmp_path, ASYNC)
    padding = [[0] * len(right[0])]

    assert Step(host, sampled).rows(engine) == [*faulty, *padding]
    assert engine.fix.apply(engine.root).status == "applied"
    assert Step(host, sampled).rows(engine) == [*right, *padding]


@pytest.mark.parametrize("case", CASES)
def test_release_with_the_upstream_change_reads_the_same(tmp_path: Path, case: str) -> None:
    host, sampled, _, right = CASES[case]
    engine = install(tmp_path, ASYNC, RIGHT[ASYNC])

    assert Step(host, sampled).rows(engine)[:-1] == right


def test_rows_are_read_by_requests_that_no_step_carries_over(tmp_path: Path) -> None:
    """Rows keep right from step to step, whoever takes part: the buffer's past never shows."""
    engine = install(tmp_path, ASYNC)
    engine.fix.apply(engine.root)
    names = ["a", "b", "c"]
    for present in range(1, 8):
        for previous in range(8):
            host = {name: [50 + at] for at, name in enumerate(names) if present >> at & 1}
            sampled = {name: 30 + at for at, name in enumerate(names) if previous >> at & 1}
            right = [[sampled.get(name, tokens[0])] for name, tokens in host.items()]
            assert Step(host, sampled or None).rows(engine)[:-1] == right


@pytest.mark.parametrize(("is_async", "is_dummy"), [(False, False), (True, True), (False, True)])
def test_other_steps_are_as_they_were(tmp_path: Path, is_async: bool, is_dummy: bool) -> None:
    engine = install(tmp_path, ASYNC)
    before = Step({"a": [51], "b": [52]}, {"a": 31}).rows(engine, is_async, is_dummy)
    engine.fix.apply(engine.root)
    step = Step({"a": [51], "b": [52]}, {"a": 31})

    assert step.rows(engine, is_async, is_dummy) == before == [[51], [52], [0]]
    assert step.hpu.tolist()[:2] == [STALE, STALE + 1]


def test_copies_that_may_still_run_dont_read_the_buffer_that_the_next_step_fills(tmp_path: Path) -> None:
    engine = install(tmp_path, ASYNC)
    engine.fix.apply(engine.root)
    step = Step({"a": [51], "b": [52]}, None)
    step.rows(engine)

    assert len(step.hpu.copied_from) == 1
    assert not np.shares_memory(step.hpu.copied_from[0], step.cpu.array)
