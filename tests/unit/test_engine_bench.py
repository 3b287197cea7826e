from __future__ import annotations

import random

import pytest
from tests.fake_device import FakeDevice, byte_tokenizer, small_limits

from loadproof.bench import WORKLOADS, Measurement, Workload, _median_of, measure, random_prompts
from loadproof.engine.admission import RequestError
from loadproof.engine.engine import Engine


def test_prompts_are_those_that_other_engines_are_given() -> None:
    workload = Workload("small", 3, 5, 1)
    draw = random.Random(2)
    ids = [[draw.randrange(100, 40000) for _ in range(5)] for _ in range(3)]
    assert random_prompts(workload, 49152, 2) == ids
    assert random_prompts(workload, 260, 2) == [[token % 260 for token in prompt] for prompt in ids]


def test_workloads_have_names_of_their_own() -> None:
    assert [workload.name for workload in WORKLOADS] == ["single", "batch16", "batch64", "prefill"]


def test_rates_follow_from_sizes_and_time() -> None:
    device = FakeDevice(small_limits())
    run = measure(Engine(device, byte_tokenizer()), Workload("small", 4, 10, 6), seed=1)
    assert device.num_rows == 4 * (10 + 5)
    assert round(run.output_tokens_per_s * run.elapsed, 6) == 24
    assert round(run.prompt_tokens_per_s * run.elapsed, 6) == 40
    assert round(run.total_tokens_per_s * run.elapsed, 6) == 64
    assert run.itl is not None


def test_one_token_has_no_time_between_tokens() -> None:
    run = measure(Engine(FakeDevice(), byte_tokenizer()), Workload("small", 2, 10, 1), seed=1)
    assert run.itl is None


def test_a_workload_that_does_not_fit_is_refused() -> None:
    engine = Engine(FakeDevice(small_limits()), byte_tokenizer())
    most = engine.device.limits.max_model_len
    assert measure(engine, Workload("most", 1, 3, most - 3), seed=1).output_tokens == most - 3
    with pytest.raises(RequestError, match=f"workload more makes requests of 3 \\+ {most - 2} tokens"):
        measure(engine, Workload("more", 1, 3, most - 2), seed=1)


def test_rates_of_several_runs_follow_from_their_median_time() -> None:
    runs = [Measurement(40, 24, elapsed, elapsed / 2, None) for elapsed in (1.0, 8.0, 2.0, 100.0)]
    for count, elapsed in ((1, 1.0), (2, 4.5), (3, 2.0), (4, 5.0)):
        report = _median_of(runs[:count]).as_dict()
        assert report == {
            "prompt_tokens": 40,
            "output_tokens": 24,
            "elapsed": elapsed,
            "ttft": elapsed / 2,
            "itl": None,
            "prompt_tokens_per_s": 40 / elapsed,
            "output_tokens_per_s": 24 / elapsed,
            "total_tokens_per_s": 64 / elapsed,
        }
