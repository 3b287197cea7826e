"""``/v1/models``, ``/version`` and ``/health``, by OpenAI's client and by plain requests."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from tests.server.running import MODEL_NAME, MakeServer, Running

import loadproof
from loadproof import LLM


def test_the_one_model_is_listed(client: openai.OpenAI, server: Running, reference: LLM) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL_NAME, "model", "loadproof")
    assert model.created == server.app.state.server.created
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 256
    assert model.model_extra["system_fingerprint"] == reference.system_fingerprint


def test_a_model_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL_NAME) == client.models.list().data[0]


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-5' does not exist; this server has 'tiny'"):
        client.models.retrieve("gpt-5")


def test_a_name_with_slashes_and_spaces(make_server: MakeServer) -> None:
    served = make_server(served_model_name="org/a model")
    assert served.openai().models.retrieve("org/a model").id == "org/a model"
    assert served.http().get("/v1/models/org/a%20model").json()["id"] == "org/a model"


async def ask_async(url: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return [model.id async for model in client.models.list()]


def test_the_async_client(server: Running) -> None:
    assert asyncio.run(ask_async(server.url)) == [MODEL_NAME]


def test_a_raw_response(client: openai.OpenAI) -> None:
    raw = client.models.with_raw_response.list()
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().data[0].id == MODEL_NAME


def test_version(http: httpx.Client, reference: LLM) -> None:
    assert http.get("/version").json() == {
        "version": loadproof.__version__,
        "system_fingerprint": reference.system_fingerprint,
    }


def test_health(http: httpx.Client) -> None:
    answer = http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
