"""Whatever the load, the order and the limits: the tokens a request gets alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_device import VOCAB_SIZE, FakeDevice, byte_tokenizer, logits_of, small_limits

from loadproof import RequestOutput, SamplingParams
from loadproof.devices.device import DeviceLimits
from loadproof.engine.engine import Engine
from loadproof.engine.pipeline import PipelineOptions
from loadproof.engine.scheduler import SchedulerOptions

TOKENIZER = byte_tokenizer()
Ask = tuple[list[int], SamplingParams]


def _asks(seed: int, count: int) -> list[Ask]:
    """Requests of every kind: greedy and sampled, penalties, biases, stops, several completions."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(1, 70))] for _ in range(count)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {65: 5.0, 66: -100.0}, "min_p": 0.05},
        {"min_tokens": 6, "stop_token_ids": list(range(128))},
        {"stop": ["a", "bc"], "min_tokens": 2},
        {"n": 3},
        {"logprobs": 3},
    ]
    return [
        (prompt, SamplingParams(seed=index, max_tokens=draw.randint(6, 40), **kinds[index % len(kinds)]))
        for index, prompt in enumerate(prompts)
    ]


def _run(engine: Engine, asks: list[Ask], gaps: list[int] | None = None) -> list[RequestOutput]:
    """All the requests' outputs; ``gaps`` are the steps between one arrival and the next."""
    outputs: dict[str, RequestOutput] = {}

    def receive(output: RequestOutput) -> None:
        outputs[output.request_id] = output

    ids = []
    for index, (prompt, params) in enumerate(asks):
        ids.append(engine.add_request(prompt, params, on_output=receive))
        for _ in range(gaps[index] if gaps else 0):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    return [outputs[name] for name in ids]


def _alone(asks: list[Ask]) -> list[RequestOutput]:
    return [_run(Engine(FakeDevice(), TOKENIZER), [ask])[0] for ask in asks]


def _same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.outputs == other.outputs


ASKS = _asks(1, 24)
ALONE = _alone(ASKS)


@pytest.mark.parametrize("budget", [1, 3, 16, 64, 2048])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 32])
def test_limits_never_change_an_answer(budget: int, max_num_seqs: int) -> None:
    limits = small_limits(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    device = FakeDevice(limits)
    _same(_run(Engine(device, TOKENIZER), ASKS), ALONE)
    assert device.largest_step <= budget


def test_a_cache_for_one_request_serves_all_in_turn() -> None:
    limits = small_limits(num_blocks=8)
    _same(_run(Engine(FakeDevice(limits), TOKENIZER), ASKS), ALONE)


@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(len(ASKS))),
    gaps=st.lists(st.integers(0, 4), min_size=len(ASKS), max_size=len(ASKS)),
    limits=st.builds(
        DeviceLimits, st.integers(1, 100), st.integers(1, 9), st.just(128), st.just(16), st.integers(8, 40)
    ),
)
def test_arrival_never_changes_an_answer(order: list[int], gaps: list[int], limits: DeviceLimits) -> None:
    engine = Engine(FakeDevice(limits), TOKENIZER)
    found = _run(engine, [ASKS[index] for index in order], gaps)
    _same(found, [ALONE[index] for index in order])


def test_every_position_is_computed_once() -> None:
    device = FakeDevice(small_limits(max_num_batched_tokens=7))
    # Shared prefixes and steps ahead of the results would save and add some.
    alone = SchedulerOptions(enable_prefix_caching=False)
    engine = Engine(device, TOKENIZER, scheduling=alone, pipeline=PipelineOptions(async_scheduling=False))
    outputs = _run(engine, ASKS)
    expected = sum(
        len(output.prompt_token_ids) + len(completion.token_ids) - 1
        for output in outputs
        for completion in output.outputs
    )
    assert device.num_rows == expected


def test_greedy_tokens_are_the_models_own() -> None:
    """Against the fake model asked directly, without engine or cache."""
    prompt = [5, 6, 7]
    (output,) = _run(
        Engine(FakeDevice(), TOKENIZER),
        [(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))],
    )
    known = list(prompt)
    for _ in range(30):
        known.append(int(logits_of(known).argmax()))
    assert output.outputs[0].token_ids == known[3:]


def test_completions_of_one_request_are_those_of_following_seeds() -> None:
    params = SamplingParams(n=3, seed=2**64 - 2, max_tokens=12)
    (together,) = _run(Engine(FakeDevice(), TOKENIZER), [([1, 2], params)])
    assert [completion.seed for completion in together.outputs] == [2**64 - 2, 2**64 - 1, 0]
    assert len({tuple(completion.token_ids) for completion in together.outputs}) == 3
    for completion in together.outputs:
        alone = SamplingParams(seed=completion.seed, max_tokens=12)
        (single,) = _run(Engine(FakeDevice(), TOKENIZER), [([1, 2], alone)])
        assert single.outputs[0].token_ids == completion.token_ids


def test_a_reported_seed_gives_the_answer_again() -> None:
    ask = ([9, 8], SamplingParams(max_tokens=20))
    first, second = _run(Engine(FakeDevice(), TOKENIZER), [ask, ask])
    assert first.outputs[0].seed != second.outputs[0].seed
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    again = SamplingParams(max_tokens=20, seed=second.outputs[0].seed)
    (repeated,) = _run(Engine(FakeDevice(), TOKENIZER), [(ask[0], again)])
    assert repeated.outputs == second.outputs


def test_an_engines_seed_repeats_a_whole_run() -> None:
    asks = [([index], SamplingParams(max_tokens=8)) for index in range(4)]
    runs = [_run(Engine(FakeDevice(), TOKENIZER, seed=seed), asks) for seed in (7, 7, 8)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_logits_are_those_of_the_whole_prefix() -> None:
    seen: dict[tuple[str, int], list[float]] = {}
    engine = Engine(FakeDevice(small_limits(max_num_batched_tokens=5)), TOKENIZER)
    engine.on_logits = lambda name, index, position, logits: seen.update({(name, position): logits.tolist()})
    asks = [
        ([1, 2, 3], SamplingParams(seed=1, max_tokens=6)),
        ([4] * 20, SamplingParams(seed=2, max_tokens=4)),
    ]
    for output in _run(engine, asks):
        known = output.prompt_token_ids + output.outputs[0].token_ids
        for position in range(len(output.prompt_token_ids), len(known)):
            expected = logits_of(known[:position]).tolist()
            assert seen.pop((output.request_id, position)) == expected
    assert not seen


def test_logprobs_are_of_the_raw_logits_with_the_chosen_token_first() -> None:
    params = SamplingParams(seed=3, max_tokens=10, logprobs=4, temperature=1.5, logit_bias={65: 100.0})
    (output,) = _run(Engine(FakeDevice(), TOKENIZER), [([1], params)])
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert completion.token_ids == [65] * len(completion.token_ids)
    total = 0.0
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(position)) == token_id
        ranks = [position[key].rank for key in list(position)[1:]]
        assert ranks == [rank for rank in (1, 2, 3, 4) if rank != position[token_id].rank]
        assert len(position) in (4, 5)
        total += position[token_id].logprob
    assert completion.cumulative_logprob == total


def test_all_of_the_vocabulary_where_the_engine_allows_it() -> None:
    engine = Engine(FakeDevice(), TOKENIZER, max_logprobs=-1)
    (output,) = _run(engine, [([1], SamplingParams(max_tokens=1, logprobs=-1))])
    assert output.outputs[0].logprobs is not None
    assert set(output.outputs[0].logprobs[0]) == set(range(VOCAB_SIZE))


def _prompt_that_holds_its_best_token() -> list[int]:
    """Its best next token is one of its own, by so little that any penalty would change it."""
    for first in range(VOCAB_SIZE):
        for second in range(VOCAB_SIZE):
            second_best, best = np.sort(logits_of([first, second]))[-2:]
            if int(logits_of([first, second]).argmax()) in (first, second) and best - second_best < 1:
                return [first, second]
    raise AssertionError("the fake model has no such prompt")


def test_only_the_repetition_penalty_counts_the_prompt() -> None:
    prompt = _prompt_that_holds_its_best_token()
    best = int(logits_of(prompt).argmax())
    penalties: list[dict[str, Any]] = [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 5.0},
    ]
    asks = [(prompt, SamplingParams(temperature=0, max_tokens=1, **penalty)) for penalty in penalties]
    found = [output.outputs[0].token_ids == [best] for output in _run(Engine(FakeDevice(), TOKENIZER), asks)]
    assert found == [True, True, False]


def test_penalties_count_the_output() -> None:
    (letter,) = TOKENIZER.encode("x")
    bias = {letter: 30.0}
    params = SamplingParams(
        temperature=0, max_tokens=40, logit_bias=bias, frequency_penalty=2.0, ignore_eos=True
    )
    (output,) = _run(Engine(FakeDevice(), TOKENIZER), [([letter] * 50, params)])
    # 30 above the others, less 2 each time: some 15 times it leads, and then no longer.
    assert 10 <= output.outputs[0].token_ids.count(letter) <= 25
    assert output.outputs[0].token_ids[:8] == [letter] * 8
