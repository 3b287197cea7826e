"""``/metrics``: what is counted, under which names, and that it answers whatever the engine does."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.server.gate import slowed
from tests.server.running import MODEL_NAME, MakeServer, Running

from loadproof import __version__
from loadproof.server import histogram
from loadproof.server.histogram import Histogram, token_bounds
from loadproof.server.metric_names import ENGINE_COUNTERS, ENGINE_GAUGES
from loadproof.server.routes import metrics as route

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "metrics.md"
LABELS = {"model_name": MODEL_NAME, "engine": "0"}
# What vLLM 0.32 and its dashboards call them; a counter's samples have "_total" after its name.
VLLM_NAMES = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    "counter": (
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
    ),
    "histogram": (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_prefill_kv_computed_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ),
}


class Scrape:
    """A page of metrics, read by the official parser."""

    def __init__(self, served: Running) -> None:
        answer = served.http().get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        self.families: dict[str, Metric] = {
            family.name: family for family in text_string_to_metric_families(answer.text)
        }

    def value(self, sample_name: str, **labels: str) -> float:
        """The one sample that has these labels among its own."""
        (found,) = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == sample_name and labels.items() <= sample.labels.items()
        ]
        return found

    def bounds(self, name: str) -> list[float]:
        """Where a histogram's buckets end."""
        samples = self.families[name].samples
        return [float(one.labels["le"]) for one in samples if one.name.endswith("_bucket")]


@pytest.fixture
def served(make_server: MakeServer) -> Running:
    """A server of which nobody has asked anything."""
    return make_server()


@pytest.fixture
def blocked(served: Running) -> Iterator[Running]:
    """A server whose engine is stuck until the end of the test; it has answered once."""
    complete(served, max_tokens=3)
    served.wait_until_idle()
    Scrape(served)
    stuck, release = threading.Event(), threading.Event()

    def block() -> None:
        stuck.set()
        release.wait()

    served.app.state.server.engine._commands.put(block)
    stuck.wait()
    yield served
    release.set()


def complete(served: Running, **more: object) -> openai.types.Completion:
    settings = {"model": MODEL_NAME, "prompt": "hello", "extra_body": {"ignore_eos": True}, **more}
    answer: openai.types.Completion = served.openai().completions.create(**settings)  # type: ignore[call-overload]
    return answer


def test_the_names_and_types_are_vllms(make_server: MakeServer) -> None:
    page = Scrape(make_server(metrics_prefix="vllm"))
    for kind, names in VLLM_NAMES.items():
        for name in names:
            family = page.families[f"vllm:{name}"]
            assert family.type == kind
            for sample in family.samples:
                assert LABELS.items() <= sample.labels.items()
    assert not any(name.startswith("loadproof:") for name in page.families)


def test_the_bounds_are_vllms(served: Running) -> None:
    page = Scrape(served)
    assert page.bounds("loadproof:request_prompt_tokens")[:-1] == [1, 2, 5, 10, 20, 50, 100, 200]
    assert page.bounds("loadproof:request_params_n") == [1, 2, 5, 10, 20, float("inf")]
    assert page.bounds("loadproof:time_to_first_token_seconds")[:3] == [0.001, 0.005, 0.01]
    assert page.bounds("loadproof:e2e_request_latency_seconds")[-2:] == [7680, float("inf")]
    assert {0.01, 0.025, 80} < set(page.bounds("loadproof:inter_token_latency_seconds"))


def test_all_that_the_engine_counts_is_shown(served: Running) -> None:
    assert served.llm.stats().keys() == ENGINE_GAUGES.keys() | ENGINE_COUNTERS.keys()
    complete(served, max_tokens=5)
    stats = served.wait_until_idle()
    page = Scrape(served)
    for key, (name, _) in ENGINE_GAUGES.items():
        assert page.value(f"loadproof:{name}", **LABELS) == stats[key], key
    for key, (name, _) in ENGINE_COUNTERS.items():
        assert page.value(f"loadproof:{name}_total", **LABELS) == stats[key], key
    assert stats["generation_tokens"] == 5


def test_a_request_is_measured(served: Running) -> None:
    answer = complete(served, max_tokens=7, n=2)
    page = Scrape(served)
    assert answer.usage is not None
    assert page.value("loadproof:request_success_total", finished_reason="length") == 2
    assert page.value("loadproof:request_success_total", finished_reason="stop") == 0
    for name, count, total in (
        ("request_prompt_tokens", 1, answer.usage.prompt_tokens),
        ("request_prefill_kv_computed_tokens", 1, answer.usage.prompt_tokens),
        ("request_generation_tokens", 2, 14),
        ("request_max_num_generation_tokens", 1, 7),
        ("request_params_n", 1, 2),
        ("request_params_max_tokens", 1, 7),
    ):
        assert page.value(f"loadproof:{name}_count") == count, name
        assert page.value(f"loadproof:{name}_sum") == total, name
    for name, count in (
        ("time_to_first_token", 2),
        ("inter_token_latency", 12),
        ("time_per_output_token", 12),
        ("request_time_per_output_token", 1),
        ("e2e_request_latency", 1),
        ("request_queue_time", 1),
        ("request_prefill_time", 1),
        ("request_decode_time", 1),
        ("request_inference_time", 1),
    ):
        assert page.value(f"loadproof:{name}_seconds_count") == count, name
        assert page.value(f"loadproof:{name}_seconds_sum") > 0, name


def test_times_add_up(served: Running) -> None:
    complete(served, max_tokens=7)
    page = Scrape(served)

    def total(name: str) -> float:
        return page.value(f"loadproof:{name}_seconds_sum")

    assert total("request_prefill_time") + total("request_decode_time") == pytest.approx(
        total("request_inference_time")
    )
    first = total("request_queue_time") + total("request_prefill_time")
    assert total("time_to_first_token") == pytest.approx(first)
    assert total("request_decode_time") == pytest.approx(total("inter_token_latency"))
    assert total("request_time_per_output_token") == pytest.approx(total("request_decode_time") / 6)
    assert total("e2e_request_latency") >= first + total("request_decode_time")


def test_cached_tokens_are_not_counted_as_computed(make_server: MakeServer) -> None:
    served = make_server(block_size=16)
    prompt = [5] * 33
    for _ in range(2):
        complete(served, prompt=prompt, max_tokens=1)
    page = Scrape(served)
    assert page.value("loadproof:request_prompt_tokens_sum") == 66
    assert page.value("loadproof:prefix_cache_hits_total") == 32
    assert page.value("loadproof:request_prefill_kv_computed_tokens_sum") == 34


def test_an_aborted_request_counts_as_such_alone(served: Running) -> None:
    with slowed(served.llm):
        stream = served.openai().completions.create(
            model=MODEL_NAME, prompt="hello", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        served.wait_for(lambda stats: stats["num_aborted"] == 1)
        served.check_no_leak()
    page = Scrape(served)
    assert page.value("loadproof:request_success_total", finished_reason="abort") == 1
    assert page.value("loadproof:num_requests_aborted_total") == 1
    assert page.value("loadproof:e2e_request_latency_seconds_count") == 0
    assert page.value("loadproof:request_generation_tokens_count") == 0
    assert page.value("loadproof:kv_cache_usage_perc") == 0


def test_what_the_server_is(make_server: MakeServer) -> None:
    served = make_server(block_size=16, num_blocks_override=40, enable_prefix_caching=False)
    page = Scrape(served)
    cache = {"block_size": "16", "num_gpu_blocks": "40", "enable_prefix_caching": "False"}
    assert page.value("loadproof:cache_config_info", **LABELS, **cache) == 1
    build = {"version": __version__, "system_fingerprint": served.llm.system_fingerprint}
    assert page.value("loadproof:build_info", **build) == 1


def test_a_live_engine(served: Running) -> None:
    page = Scrape(served)
    assert page.value("loadproof:engine_alive", **LABELS) == 1
    assert page.value("process_resident_memory_bytes") > 0


def test_a_dead_engine_leaves_what_was_known(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(served, max_tokens=5)
    Scrape(served)

    def step() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(served.llm.engine, "step", step)
    with pytest.raises(openai.InternalServerError):
        complete(served, max_tokens=5)
    page = Scrape(served)
    assert page.value("loadproof:engine_alive") == 0
    assert page.value("loadproof:engine_stats_age_seconds") > 0
    assert page.value("loadproof:generation_tokens_total") == 5
    assert page.value("http_requests_total", handler="/v1/completions", status="500") == 1


def test_a_frozen_engine_leaves_what_was_known(blocked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "STATS_TIMEOUT", 0.05)
    ages = [Scrape(blocked).value("loadproof:engine_stats_age_seconds") for _ in range(2)]
    assert 0 < ages[0] < ages[1]
    page = Scrape(blocked)
    assert page.value("loadproof:engine_alive") == 1
    assert page.value("loadproof:generation_tokens_total") == 3


def test_http_requests_by_route_method_and_status(served: Running) -> None:
    http = served.http()
    complete(served, max_tokens=1)
    http.get("/v1/models/a")
    http.get("/v1/models/b")
    http.get("/v1/completions")
    page = Scrape(served)
    assert page.value("http_requests_total", handler="/v1/completions", method="POST", status="200") == 1
    assert page.value("http_requests_total", handler="/v1/models/{model:path}", status="404") == 2
    assert page.value("http_requests_total", handler="/v1/completions", method="GET", status="405") == 1
    assert page.value("http_request_duration_seconds_count", handler="/v1/models/{model:path}") == 2


def test_clients_can_not_make_up_series(served: Running) -> None:
    http = served.http()
    for index in range(5):
        http.request(f"MADE-UP-{index}", f"/made/up/{index}")
    page = Scrape(served)
    assert page.value("http_requests_total", handler="none", method="other", status="404") == 5


def test_refusals_at_the_door_are_counted(make_server: MakeServer) -> None:
    served = make_server(api_keys=("secret",))
    assert served.http().get("/metrics").status_code == 401
    answer = served.http(headers={"authorization": "Bearer secret"}).get("/metrics")
    assert 'http_requests_total{handler="none",method="GET",status="401"} 1.0' in answer.text


def test_two_servers_of_one_process_count_by_themselves(server: Running, served: Running) -> None:
    complete(served, max_tokens=1)
    before = Scrape(server).value("loadproof:num_requests_total")
    complete(served, max_tokens=1)
    assert Scrape(served).value("loadproof:num_requests_total") == 2
    assert Scrape(server).value("loadproof:num_requests_total") == before


def test_every_metric_is_in_the_documentation(served: Running) -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", DOCUMENTATION.read_text(), re.MULTILINE))
    http_names = {"http_requests_total": "counter", "http_request_duration_seconds": "histogram"}
    page = Scrape(served)
    shown = {
        name.removeprefix("loadproof:") + ("_total" if family.type == "counter" else ""): family.type
        for name, family in page.families.items()
        if name.startswith("loadproof:")
    }
    assert documented == shown | http_names


def test_the_page_is_documented(http: httpx.Client) -> None:
    responses = http.get("/openapi.json").json()["paths"]["/metrics"]["get"]["responses"]
    assert list(responses["200"]["content"]) == ["text/plain"]


@pytest.mark.parametrize(
    ("limit", "bounds"),
    [
        (1, [1]),
        (4, [1, 2]),
        (100, [1, 2, 5, 10, 20, 50, 100]),
        (2048, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]),
    ],
)
def test_bounds_for_tokens_end_at_the_models_length(limit: int, bounds: list[int]) -> None:
    assert list(token_bounds(limit)) == bounds


@given(st.lists(st.floats(0, 200) | st.sampled_from(histogram.NEXT_TOKEN_SECONDS)))
def test_a_bucket_counts_all_up_to_its_bound(values: list[float]) -> None:
    counted = Histogram(histogram.NEXT_TOKEN_SECONDS)
    for value in values:
        counted.observe(value)
    bounds = [*histogram.NEXT_TOKEN_SECONDS, float("inf")]
    expected = [float(sum(value <= bound for value in values)) for bound in bounds]
    assert [count for _, count in counted.buckets()] == expected
    assert [float(name) for name, _ in counted.buckets()] == bounds
    assert counted.total == pytest.approx(sum(values))


def test_bounds_rise() -> None:
    for bounds in (
        histogram.REQUEST_SECONDS,
        histogram.FIRST_TOKEN_SECONDS,
        histogram.NEXT_TOKEN_SECONDS,
        histogram.PARAMS_N,
        token_bounds(10**6),
    ):
        assert all(bisect_left(bounds, bound) == place for place, bound in enumerate(bounds))
        assert len(set(bounds)) == len(bounds)
