"""A short soak: hundreds of requests are cut, and nothing is left of them."""

from __future__ import annotations

import asyncio

import openai
from tests.server.running import Running
from tests.server.soak import Report, Soak, leftovers, tiny_server


def test_a_short_soak_leaves_nothing_behind() -> None:
    with tiny_server() as (url, pid):
        report = asyncio.run(Soak(url, pid, seconds=4, num_aborts=200, num_clients=48).run())
    assert report.problems == []
    assert report.num_aborted >= 200
    assert report.num_finished > 0


def test_growth_is_found() -> None:
    flat = Report(memory=[(float(i), 100.0 + (i % 3)) for i in range(100)])
    assert flat.growth == 0.0
    growing = Report(memory=[(float(i), 100.0 + i) for i in range(100)])
    assert growing.growth == 57.0


def test_what_is_left_is_found() -> None:
    metrics = "# TYPE vllm:num_requests_running gauge\n"
    metrics += 'vllm:num_requests_running{model_name="a"} 1.0\nvllm:kv_cache_usage_perc{model_name="a"} 0.0\n'
    assert leftovers(metrics) == {"num_requests_running": 1.0}


def test_the_client_is_the_first_to_close_an_idle_connection(server: Running) -> None:
    """Else a request is lost that sets out just as the server closes."""
    kept = openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert kept is not None
    assert server.uvicorn.config.timeout_keep_alive > 2 * kept
