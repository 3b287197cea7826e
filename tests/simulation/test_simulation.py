"""200,000 steps of the real scheduler, pool and pipeline, and proof that they met every difficulty."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner
from tests.simulation.campaign import campaign
from tests.simulation.run import main
from tests.simulation.simulator import simulate
from tests.simulation.summary import Summary

NUM_STEPS = 200_000
JOBS = 2


@pytest.fixture(scope="module")
def total() -> Summary:
    total = Summary()
    for summary in campaign(NUM_STEPS, seed=1, jobs=JOBS):
        total.add(summary)
    return total


def test_all_that_must_hold_holds_in_every_step(total: Summary) -> None:
    assert total.steps >= NUM_STEPS


@pytest.mark.parametrize(
    ("counter", "least"),
    {
        "scenarios": 1000,
        "requests": 20_000,
        "rows": 300_000,
        "tokens": 200_000,
        "discarded_tokens": 3000,
        "carried_rows": 100_000,
        "preemptions": 3000,
        "preemptions_in_flight": 1500,
        "preemptions_in_prefill": 100,
        "resumed_with_hits": 1000,
        "sat_out_steps": 5000,
        "hit_tokens": 10_000,
        "parked": 500,
        "evictions": 50_000,
        "resets": 300,
        "aborts_waiting": 1000,
        "aborts_running": 1000,
        "aborts_in_last_step": 100,
        "stopped_by_token": 1000,
        "stopped_by_host": 1000,
        "failures": 200,
        "scored": 25_000,
        "scores_from_cache": 500,
        "chunks_without_rows": 75,
        "preemptions_in_scoring": 40,
    }.items(),
)
def test_every_difficulty_was_met_often(total: Summary, counter: str, least: int) -> None:
    assert getattr(total, counter) >= least


def test_no_counter_goes_unasked() -> None:
    asked = test_every_difficulty_was_met_often.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {counter for counter, _ in asked} | {"steps"} == set(asdict(Summary()))


def test_a_seed_replays() -> None:
    assert [simulate(seed) for seed in range(40, 50)] == [simulate(seed) for seed in range(40, 50)]


def test_seeds_follow_one_another_in_any_number_of_processes() -> None:
    alone = list(campaign(3000, seed=5))
    assert alone == list(campaign(3000, seed=5, jobs=2))
    assert alone[1:3] == [simulate(6), simulate(7)]
    assert sum(summary.steps for summary in alone[:-1]) < 3000


def test_the_command_prints_a_summary() -> None:
    result = CliRunner().invoke(main, ["--steps", "500", "--seed", "3", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.output)
    total = Summary()
    for summary in campaign(500, seed=3):
        total.add(summary)
    assert replace(total, **{name: found[name] for name in asdict(total)}) == total
    assert found["ok"] is True
    assert "preemptions" in CliRunner().invoke(main, ["--steps", "1"]).output
