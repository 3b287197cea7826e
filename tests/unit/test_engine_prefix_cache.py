"""The prefix cache as requests see it: rows saved, and never an answer changed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fake_device import FakeDevice, byte_tokenizer, fake_loader, small_limits

from loadproof import LLM, RequestOutput, SamplingParams
from loadproof.engine.admission import RequestError
from loadproof.engine.engine import Engine
from loadproof.engine.pipeline import PipelineOptions
from loadproof.engine.scheduler import SchedulerOptions

TOKENIZER = byte_tokenizer()
PROMPT = [index % 250 for index in range(70)]  # four full blocks of 16 and six tokens
SEEDED = SamplingParams(seed=3, max_tokens=9, ignore_eos=True, logprobs=2)


class Served:
    """An engine on a fake device, with the rows that each call took."""

    def __init__(
        self, *, caching: bool = True, policy: str = "fcfs", ahead: bool = False, **limits: int
    ) -> None:
        self.device = FakeDevice(small_limits(max_num_batched_tokens=256, **limits))
        scheduling = SchedulerOptions(policy, caching)
        self.engine = Engine(
            self.device,
            TOKENIZER,
            scheduling=scheduling,
            pipeline=PipelineOptions(ahead, check_integrity=True),
        )

    def ask(self, prompt: list[int], params: SamplingParams = SEEDED, **placing: Any) -> list[RequestOutput]:
        """Queue a request; its output appears in the list."""
        outputs: list[RequestOutput] = []
        self.engine.add_request(prompt, params, on_output=outputs.append, **placing)
        return outputs

    def answer(self, prompt: list[int], params: SamplingParams = SEEDED, **placing: Any) -> RequestOutput:
        outputs = self.ask(prompt, params, **placing)
        self.drain()
        return outputs[0]

    def drain(self) -> int:
        """Run all to their end; how many rows that took."""
        before = self.device.num_rows
        while self.engine.has_unfinished():
            self.engine.step()
        return self.device.num_rows - before


@pytest.mark.parametrize("num_same", [0, 1, 15, 16, 17, 48, 63, 64, 65, 70])
def test_hits_save_exactly_the_full_blocks_that_agree(num_same: int) -> None:
    served = Served()
    served.answer(PROMPT)
    cold = Served().answer(other := [*PROMPT[:num_same], *[255] * (70 - num_same)])
    outputs = served.ask(other)
    saved = 16 * (num_same // 16)
    assert served.drain() == 70 + 8 - saved
    assert outputs[0].num_cached_tokens == saved
    assert outputs[0].outputs == cold.outputs


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_a_prompt_of_whole_blocks_computes_its_last_one(num_blocks: int) -> None:
    served = Served()
    prompt = PROMPT[: 16 * num_blocks]
    cold = served.answer(prompt)
    warm = served.ask(prompt)
    assert served.drain() == 16 + 8
    assert warm[0].num_cached_tokens == 16 * (num_blocks - 1)
    assert warm[0].outputs == cold.outputs


def test_an_answer_is_cached_for_the_turn_that_follows_it() -> None:
    served = Served()
    params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
    first = served.answer(PROMPT, params)
    following = [*PROMPT, *first.outputs[0].token_ids, 1, 2, 3]
    outputs = served.ask(following)
    assert served.drain() == 103 - 96 + 8
    assert outputs[0].num_cached_tokens == 96
    assert outputs[0].outputs == Served().answer(following).outputs


def test_completions_share_their_prompts_blocks() -> None:
    served = Served()
    together = served.ask(PROMPT, SamplingParams(n=4, seed=3, max_tokens=9, ignore_eos=True))
    assert served.drain() == 70 + 3 * (70 - 64) + 4 * 8
    assert together[0].num_cached_tokens == 0
    apart = Served(caching=False)
    for completion in together[0].outputs:
        params = SamplingParams(seed=completion.seed, max_tokens=9, ignore_eos=True)
        assert apart.answer(PROMPT, params).outputs[0].token_ids == completion.token_ids
    stats = served.engine.stats()
    assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (4 * 70, 3 * 64)


@pytest.mark.parametrize("ahead", [True, False])
def test_requests_that_arrive_together_compute_their_prompt_once(ahead: bool) -> None:
    served = Served(ahead=ahead)
    asks = [served.ask(PROMPT, SamplingParams(seed=seed, max_tokens=5, ignore_eos=True)) for seed in range(6)]
    rows = served.drain()
    assert rows == 70 + 5 * 6 + 6 * 4
    assert [outputs[0].num_cached_tokens for outputs in asks] == [0] + [64] * 5


def test_without_the_cache_everything_is_computed() -> None:
    served = Served(caching=False)
    first = served.answer(PROMPT)
    outputs = served.ask(PROMPT)
    assert served.drain() == 70 + 8
    assert outputs[0].num_cached_tokens == 0
    assert outputs[0].outputs == first.outputs
    stats = served.engine.stats()
    assert (stats["prefix_cache_queries"], stats["num_cached_blocks"]) == (0, 0)


def test_only_requests_of_one_salt_share() -> None:
    served = Served()
    found = [
        served.answer(PROMPT, cache_salt=salt)
        for salt in (None, "a", "b", "a", None, "\ud800", "\udc00", "\ud800")
    ]
    assert [output.num_cached_tokens for output in found] == [0, 0, 0, 64, 64, 0, 0, 64]
    assert all(output.outputs == found[0].outputs for output in found)


def test_nothing_computed_before_a_reset_is_offered_after_it() -> None:
    served = Served()
    running = served.ask(PROMPT, SamplingParams(seed=1, max_tokens=40, ignore_eos=True))
    for _ in range(5):
        served.engine.step()
    assert served.engine.reset_prefix_cache()
    assert served.engine.stats()["num_cached_blocks"] == 0
    assert served.answer(PROMPT).num_cached_tokens == 0
    served.drain()
    assert served.answer(PROMPT).num_cached_tokens == 64, "what was computed after it is"
    output = [*PROMPT, *running[0].outputs[0].token_ids]
    # The answer's blocks after the prompt began before the reset.
    assert served.answer(output[:100]).num_cached_tokens == 64


def test_a_request_that_gives_way_after_a_reset_computes_all_again() -> None:
    served = Served(policy="priority", num_blocks=8)
    params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
    victim = served.ask(PROMPT, params, priority=1)
    for _ in range(3):
        served.engine.step()
    served.engine.reset_prefix_cache()
    served.ask([9] * 100, SamplingParams(max_tokens=2, ignore_eos=True))
    served.drain()
    stats = served.engine.stats()
    assert (stats["num_preemptions"], stats["num_resumed_with_hits"]) == (1, 0)
    assert victim[0].outputs == Served().answer(PROMPT, params).outputs


def test_evictions_and_hits_are_counted() -> None:
    served = Served(num_blocks=8)
    for first in range(4):
        served.answer([first] * 70)
    stats = served.engine.stats()
    assert stats["num_free_blocks"] == 8
    assert 0 < stats["num_cached_blocks"] <= 8
    # Four blocks of each are cached, and there is room for those of two.
    assert stats["prefix_cache_evictions"] == 4 * 4 - stats["num_cached_blocks"]
    assert served.answer([3] * 70).num_cached_tokens > 0


@pytest.mark.parametrize(
    ("placing", "message"),
    [
        ({"priority": 1}, "priority 1 with scheduling policy 'fcfs': it needs 'priority'"),
        ({"priority": 1.0}, r"priority must be an integer of 64 bits, not 1\.0"),
        ({"priority": True}, "priority must be an integer"),
        ({"priority": None}, "priority must be an integer"),
        ({"priority": 2**63}, "priority must be an integer of 64 bits"),
        ({"priority": -(2**63) - 1}, "priority must be an integer of 64 bits"),
        ({"cache_salt": ""}, "cache_salt must be text that is not empty"),
        ({"cache_salt": b"a"}, "cache_salt must be text"),
        ({"cache_salt": 5}, "cache_salt must be text"),
    ],
)
def test_what_cannot_be_placed_is_refused(placing: dict[str, Any], message: str) -> None:
    served = Served()
    with pytest.raises(RequestError, match=message):
        served.ask([1], **placing)
    assert not served.engine.has_unfinished()


@pytest.mark.parametrize("priority", [-(2**63), -1, 0, 2**63 - 1])
def test_priorities_of_64_bits_are_taken(priority: int) -> None:
    assert Served(policy="priority").answer([1], priority=priority).outputs


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadproof.llm.load_model", fake_loader())


@pytest.mark.usefixtures("fake")
def test_generate_takes_priorities_under_their_policy_only() -> None:
    params = SamplingParams(seed=1, max_tokens=4)
    with LLM("fake") as llm:
        plain = llm.generate([[1], [2]], params)
        assert [output.outputs for output in llm.generate([[1], [2]], params, priority=[0, 0])] == [
            output.outputs for output in plain
        ]
        with pytest.raises(RequestError, match="prompt 2 of 2: priority 1 with scheduling policy 'fcfs'"):
            llm.generate([[1], [2]], params, priority=[0, 1])
        with pytest.raises(RequestError, match="priority is a list of 2 integers, one a prompt, not"):
            llm.generate([[1], [2]], params, priority=[0])
        with pytest.raises(RequestError, match="priority is a list of 1 integers"):
            llm.generate([[1]], params, priority=3)  # type: ignore[arg-type]
        assert llm.stats()["num_running"] == llm.stats()["num_waiting"] == 0
    with LLM("fake", scheduling_policy="priority") as llm:
        found = llm.generate([[1], [2]], params, priority=[5, -5])
        assert [output.outputs for output in found] == [output.outputs for output in plain]


@pytest.mark.usefixtures("fake")
def test_prompt_objects_carry_a_salt() -> None:
    params = SamplingParams(seed=1, max_tokens=2)
    with LLM("fake", check_integrity=True) as llm:
        text = "tea " * 10
        found = [
            llm.generate(prompt, params)[0]  # type: ignore[arg-type]
            for prompt in (
                {"prompt": text, "cache_salt": "a"},
                {"prompt": text},
                {"prompt_token_ids": llm.tokenizer.encode(text), "cache_salt": "a"},
                text,
            )
        ]
        assert [output.num_cached_tokens for output in found] == [0, 0, 32, 32]
        assert len({tuple(output.outputs[0].token_ids) for output in found}) == 1
        deltas = list(llm.stream({"prompt": text, "cache_salt": "b"}, params))
        assert [token for delta in deltas for token in delta.token_ids] == found[0].outputs[0].token_ids
        assert llm.stats()["prefix_cache_hits"] == 64
        assert llm.reset_prefix_cache()
        assert llm.generate(text, params)[0].num_cached_tokens == 0


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "cache_salt": 5}, "a prompt object's cache_salt is text, not int"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be text that is not empty"),
        ({"cache_salt": "a"}, "holds either prompt or prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1], "cache_salt": "a"}, "holds either"),
        ({"prompt": "a", "salt": "a"}, "holds either"),
    ],
)
def test_prompt_objects_with_a_bad_salt_are_refused(prompt: Any, message: str) -> None:
    with LLM("fake") as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt)
        assert llm.stats()["num_requests"] == 0
