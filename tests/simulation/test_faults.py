"""The simulator finds faults: each that is put into the real code ends some scenario that runs without it."""

from __future__ import annotations

import copy
import json

import pytest
import tests.simulation.score_faults  # noqa: F401 - adds to FAULTS
from click.testing import CliRunner
from tests.simulation.faults import FAULTS
from tests.simulation.run import main
from tests.simulation.simulator import SimulationError, simulate

MOST_SCENARIOS = 300


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        FAULTS[name](patch)
        with pytest.raises(SimulationError) as found:
            _simulate_many()
    error = found.value
    assert str(error) == f"seed {error.seed}, step {error.step}: {error.reason}"
    simulate(error.seed)


def _simulate_many() -> None:
    for seed in range(MOST_SCENARIOS):
        simulate(seed)


def test_the_command_says_how_to_replay_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["salt_ignored"](monkeypatch)
    result = CliRunner().invoke(main, ["--steps", "50000", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    seed = found["failure"]["seed"]
    assert found["failure"]["replay"] == f"make simulate STEPS=1 SEED={seed}"
    again = CliRunner().invoke(main, ["--steps", "1", "--seed", str(seed)])
    assert again.exit_code == 1
    assert found["failure"]["error"] in again.stderr
    assert "Traceback" in again.stderr


def test_a_failure_in_another_process_arrives_whole() -> None:
    error = SimulationError(7, 30, "a reason")
    copied = copy.copy(error)
    assert (str(copied), copied.seed, copied.step) == ("seed 7, step 30: a reason", 7, 30)
