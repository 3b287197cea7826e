"""Log-probabilities of prompts in chunks, under pressure, through failures, and what the door refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fake_device import VOCAB_SIZE
from tests.tiny_models import write_model
from tests.unit.prompt_drive import PROMPT, Served, confirm, other_prompt

from loadproof import LLM, SamplingParams
from loadproof.engine import admission, step_plan
from loadproof.engine.admission import RequestError

# ---- Chunks, budgets and memory


@pytest.mark.parametrize("keeps_hidden", [True, False])
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 63, 64])
def test_chunks_of_every_size(budget: int, keeps_hidden: bool) -> None:
    served = Served(max_num_batched_tokens=budget, keeps_hidden=keeps_hidden)
    assert served.score(PROMPT, 3) == (70, 69)
    warm = (6, 69) if keeps_hidden else (70, 69)
    assert served.score(PROMPT, 4) == warm
    assert served.device.largest_step <= budget
    assert served.device.most_scored <= budget


def test_a_step_may_only_score() -> None:
    served = Served(max_num_batched_tokens=16)
    served.score(PROMPT, 0)
    assert served.device.num_rowless == 0
    assert served.score(PROMPT, 1) == (6, 69)
    assert served.device.num_rowless >= 3


def test_others_decode_while_a_cached_prompt_is_scored() -> None:
    served = Served(max_num_batched_tokens=8, prefill=4)
    served.score(PROMPT, 0)
    decoding = served.ask([1, 2, 3], None, max_tokens=40)
    served.engine.step()
    served.engine.step()
    scoring = served.ask(PROMPT, 5)
    served.drain()
    confirm(scoring[0], 5)
    alone = Served()
    expected_output = alone.ask([1, 2, 3], None, max_tokens=40)
    alone.drain()
    assert decoding[0].outputs == expected_output[0].outputs


@pytest.mark.parametrize(("budget", "most"), [(64, 3), (17, 1), (16, 1), (1, 1)])
def test_a_steps_lists_of_best_tokens_are_bounded(
    budget: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 260 tokens of a position cost 17 rows of the budget, or all of it."""
    monkeypatch.setattr(step_plan, "MOST_TOP_A_SCORE", 16)
    served = Served(max_num_batched_tokens=budget)
    assert served.score(PROMPT, VOCAB_SIZE) == (70, 69)
    assert served.device.most_scored == most
    assert served.score(PROMPT, 16) == (6, 69)


# ---- Pressure and failures


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("keeps_hidden", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_preempted_request_keeps_its_scores(caching: bool, keeps_hidden: bool, ahead: bool) -> None:
    """Long answers take the blocks of whoever is still being scored; nothing is scored twice for it."""
    served = Served(
        caching=caching,
        keeps_hidden=keeps_hidden,
        ahead=ahead,
        num_blocks=9,
        max_num_batched_tokens=8,
        prefill=4,
        max_model_len=100,
    )
    asks = [served.ask(other_prompt(seed, 20), 2, max_tokens=70) for seed in range(3)]
    late = [served.ask(other_prompt(seed, 60), 3, max_tokens=30) for seed in range(3, 5)]
    _, scores = served.drain()
    stats = served.engine.stats()
    assert stats["num_preemptions"] > 0
    assert scores == 3 * 19 + 2 * 59
    for outputs in asks:
        confirm(outputs[0], 2)
    for outputs in late:
        confirm(outputs[0], 3)


def test_a_request_preempted_while_it_is_scored_resumes_where_it_was() -> None:
    served = Served(policy="priority", num_blocks=8, max_num_batched_tokens=8, prefill=8, max_model_len=120)
    scoring = served.ask(PROMPT, 2, placing={"priority": 1})
    for _ in range(6):
        served.engine.step()
    so_far = served.device.num_scored
    assert 16 < so_far < 69
    urgent = served.ask(other_prompt(1, 100), 1, placing={"priority": 0})
    served.drain()
    assert served.engine.stats()["num_preemptions"] == 1
    assert served.device.num_scored == 69 + 99
    confirm(scoring[0], 2)
    confirm(urgent[0], 1)


@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_in_the_middle(num_steps: int) -> None:
    served = Served(max_num_batched_tokens=16)
    outputs = served.ask(PROMPT, 2, max_tokens=4)
    beside = served.ask(other_prompt(1), 3)
    for _ in range(num_steps):
        served.engine.step()
    finished = bool(outputs)
    assert served.engine.abort_request("0") is not finished
    served.drain()
    confirm(beside[0], 3)
    if outputs[0].prompt_logprobs is not None:
        confirm(outputs[0], 2)
    served.score(PROMPT, 2)
    stats = served.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_an_aborted_request_has_all_or_none() -> None:
    served = Served(max_num_batched_tokens=16, ahead=False)
    early = served.ask(PROMPT, 2)
    served.engine.step()
    served.engine.abort_request("0")
    assert early[0].prompt_logprobs is None
    late = served.ask(PROMPT, 2, max_tokens=20)
    for _ in range(8):
        served.engine.step()
    served.engine.abort_request("1")
    assert late[0].outputs[0].finish_reason == "abort"
    confirm(late[0], 2)


@pytest.mark.parametrize("keeps_hidden", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("failing", range(1, 9))
def test_after_a_failure_all_is_scored_that_was_lost(failing: int, ahead: bool, keeps_hidden: bool) -> None:
    served = Served(max_num_batched_tokens=24, ahead=ahead, keeps_hidden=keeps_hidden)
    served.device.fail_at_step = failing
    asks = [served.ask(prompt, k, max_tokens=6) for prompt, k in ((PROMPT, 2), (other_prompt(1), 5))]
    failures = 0
    while served.engine.has_unfinished():
        try:
            served.engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 1
    for outputs, k in zip(asks, (2, 5), strict=True):
        confirm(outputs[0], k)
    served.score(PROMPT, 2)


def test_a_listener_that_fails_costs_no_scores() -> None:
    served = Served(max_num_batched_tokens=24)

    def fail(_: object) -> None:
        raise RuntimeError("a listener failed")

    served.engine.add_request([1, 2], SamplingParams(max_tokens=1), on_delta=fail)
    outputs = served.ask(PROMPT, 2)
    with pytest.raises(RuntimeError, match="a listener failed"):
        served.drain()
    served.drain()
    confirm(outputs[0], 2)


# ---- The door


@pytest.mark.parametrize(
    ("limit", "params", "message"),
    [
        (20, {"prompt_logprobs": 21}, "prompt_logprobs 21 is above the limit of 20"),
        (20, {"prompt_logprobs": -1}, f"prompt_logprobs {VOCAB_SIZE} is above the limit of 20"),
        (0, {"prompt_logprobs": 1}, "prompt_logprobs 1 is above the limit of 0"),
        (-1, {"prompt_logprobs": VOCAB_SIZE + 1}, f"above the limit of {VOCAB_SIZE}"),
        (20, {"logprobs": -1}, f"^logprobs {VOCAB_SIZE} is above the limit of 20"),
    ],
)
def test_too_many_are_refused_with_the_limit(limit: int, params: dict[str, int], message: str) -> None:
    served = Served(max_logprobs=limit)
    with pytest.raises(RequestError, match=message):
        served.engine.add_request(PROMPT, SamplingParams(**params))  # type: ignore[arg-type]
    assert not served.engine.has_unfinished()
    served.score(PROMPT[:5], 0)


def test_too_many_in_all_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_PROMPT_LOGPROBS", 70 * 20)
    served = Served()
    served.score(PROMPT, 20)
    with pytest.raises(RequestError, match="prompt_logprobs 21 of a prompt of 70 tokens are more than 1400"):
        served.ask(PROMPT, 21)
    assert not served.engine.has_unfinished()
    served.score(PROMPT, 20)


def test_who_resumes_may_find_what_it_generated_scored_as_anothers_prompt(tmp_path: Path) -> None:
    """Those blocks lie beyond its own prompt: their scores are no business of its."""
    prompt = list(range(2, 22))
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, prompt_logprobs=1)
    shorter = SamplingParams(temperature=0, max_tokens=79, ignore_eos=True, prompt_logprobs=1)
    sizes: dict[str, Any] = {"num_threads": 1, "max_model_len": 128, "block_size": 16}
    directory = write_model(tmp_path / "llama", "llama")
    with LLM(directory, num_blocks_override=11, check_integrity=True, **sizes) as llm:
        (alone,) = llm.generate([prompt], params)
        longer = prompt + alone.outputs[0].token_ids[:29]
        before = llm.stats()["num_resumed_with_hits"]
        _, found = llm.generate([longer, prompt], [shorter, params])
        assert llm.stats()["num_resumed_with_hits"] > before
    assert found.outputs[0].token_ids == alone.outputs[0].token_ids
    assert found.prompt_logprobs == alone.prompt_logprobs
