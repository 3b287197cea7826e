"""64 chats on the real model over HTTP: the same alone and at once, streamed or not, while others are cut."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.joined import events, joined
from tests.server.running import PATIENCE, Running, running

pytestmark = pytest.mark.real_model

CHATS: list[str] = json.loads((Path(__file__).parent.parent / "exactness/prompts.json").read_text())
FULL = os.environ.get("LOADPROOF_EXACTNESS") == "full"
MAX_TOKENS = 64 if FULL else 6
PATH = "/v1/chat/completions"
PATIENCE_FOR_ALL = 20 * PATIENCE
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.2, "top_logprobs": 3},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.5},
)


@dataclass(frozen=True)
class Answer:
    """All of an answer that depends on the request alone."""

    token_ids: list[int]
    logprobs: list[Any]
    text: str
    finish_reason: str


def body_of(index: int) -> dict[str, Any]:
    """The request of one chat; no two have the same seed."""
    return {
        "messages": [{"role": "user", "content": CHATS[index]}],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        "seed": 1000 + index,
        **SAMPLING[index % len(SAMPLING)],
    }


def answer_of(choice: dict[str, Any]) -> Answer:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(choice["token_ids"], choice["logprobs"]["content"], text, choice["finish_reason"])


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[Running]:
    with running("smollm2-135m", max_model_len=1024, num_threads=2, max_num_seqs=64) as server:
        yield server
        server.check_no_leak()


async def ask(client: httpx.AsyncClient, index: int, streamed: bool) -> Answer:
    body = body_of(index)
    if not streamed:
        whole = await client.post(PATH, json=body)
        assert whole.status_code == 200, whole.text
        return answer_of(whole.json()["choices"][0])
    async with client.stream("POST", PATH, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines()]
    (choice,) = joined(events(lines))
    return answer_of(choice)


async def ask_and_go(client: httpx.AsyncClient, index: int, draw: random.Random) -> None:
    """Ask, and cut the connection after so many lines, or before the first."""
    body = {**body_of(index), "stream": True, "max_tokens": 500}
    count = draw.randrange(3 * MAX_TOKENS)
    try:
        async with asyncio.timeout(None if count else draw.random()):
            async with client.stream("POST", PATH, json=body) as answer:
                async for _ in answer.aiter_lines():
                    if not (count := count - 1):
                        return
    except TimeoutError:
        return


def client_of(server: Running) -> httpx.AsyncClient:
    """One that has as many connections as there are requests."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_FOR_ALL, limits=limits)


async def one_by_one(server: Running) -> list[Answer]:
    async with client_of(server) as client:
        return [await ask(client, index, streamed=False) for index in range(len(CHATS))]


async def all_at_once(server: Running, streamed: bool, cut: int) -> list[Answer]:
    """Answers of all chats, asked together with ``cut`` others that nobody waits for."""
    draw = random.Random(f"{streamed} {cut}")
    async with client_of(server) as client:
        calls = [ask(client, index, streamed) for index in range(len(CHATS))]
        gone = [ask_and_go(client, draw.randrange(len(CHATS)), draw) for _ in range(cut)]
        order = [*calls, *gone]
        draw.shuffle(order)
        tasks = {id(call): asyncio.ensure_future(call) for call in order}
        await asyncio.gather(*tasks.values())
        found = [tasks[id(call)].result() for call in calls]
        assert all(isinstance(one, Answer) for one in found)
        return [one for one in found if one is not None]


@pytest.fixture(scope="module")
def alone(served: Running) -> list[Answer]:
    """What each chat is answered when nothing else runs."""
    return asyncio.run(one_by_one(served))


def test_the_answers_are_worth_comparing(alone: list[Answer]) -> None:
    assert len(alone) == 64
    assert all(len(answer.token_ids) == len(answer.logprobs) == MAX_TOKENS for answer in alone)
    assert len({tuple(answer.token_ids) for answer in alone}) > 55


@pytest.mark.parametrize("cut", [0, 32], ids=["all stay", "a third is cut"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_at_once_from_as_many_connections(
    served: Running, alone: list[Answer], streamed: bool, cut: int
) -> None:
    served.llm.reset_prefix_cache()
    assert asyncio.run(all_at_once(served, streamed, cut)) == alone
    served.check_no_leak()


def test_from_a_warm_cache(served: Running, alone: list[Answer]) -> None:
    hits = served.llm.stats()["prefix_cache_hits"]
    assert asyncio.run(all_at_once(served, streamed=True, cut=0)) == alone
    assert served.llm.stats()["prefix_cache_hits"] > hits
