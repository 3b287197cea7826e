"""Log-probabilities of prompts: what the model says, whatever of it was cached, and at what cost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.fake_device import VOCAB_SIZE
from tests.unit.prompt_drive import PROMPT, TOKENIZER, Served, confirm, entry_of, expected, other_prompt

from loadproof import RequestOutput
from loadproof.engine import kept_scores
from loadproof.engine.output import Logprob
from loadproof.engine.prompt_logprobs import PromptLogprobs

# ---- What callers get


@pytest.mark.parametrize("k", [0, 1, 20, -1])
def test_each_token_but_the_first_has_its_own_entry_first_and_the_best_ones(k: int) -> None:
    served = Served()
    outputs = served.ask(PROMPT, k)
    assert served.drain() == (70, 69)
    num_top = VOCAB_SIZE if k == -1 else k
    confirm(outputs[0], num_top)
    found = outputs[0].prompt_logprobs
    assert found is not None
    assert len(found) == 70
    assert found[0] is None
    for at, token_id in enumerate(PROMPT[1:], 1):
        position = found[at]
        assert position is not None
        own = position[token_id]
        assert isinstance(own, Logprob)
        assert next(iter(position)) == token_id
        assert len(position) == num_top + (own.rank > num_top)
        assert sorted(one.rank for one in position.values())[:num_top] == list(range(1, num_top + 1))
        assert own.decoded_token == TOKENIZER.token_bytes(token_id).decode("utf-8", "replace")


def scored_output(k: int = 2) -> RequestOutput:
    served = Served()
    outputs = served.ask(PROMPT, k)
    served.drain()
    return outputs[0]


def test_entries_are_made_when_they_are_looked_at() -> None:
    found = scored_output().prompt_logprobs
    assert isinstance(found, PromptLogprobs)
    assert found[5] is not found[5]
    assert found[5] == found[5]
    assert found[-1] == found[69]
    assert found[1:4] == [found[1], found[2], found[3]]
    assert found[::-1] == list(reversed(found))
    for index in (70, -71):
        with pytest.raises(IndexError):
            found[index]
    assert found == list(found)
    assert found == scored_output().prompt_logprobs
    assert found != list(found)[:-1]
    assert found != scored_output(3).prompt_logprobs
    assert found != 3
    assert repr(found) == repr(list(found))
    with pytest.raises(TypeError, match="unhashable"):
        hash(found)


def test_the_numbers_can_be_had_without_dicts() -> None:
    found = scored_output(0).prompt_logprobs
    assert isinstance(found, PromptLogprobs)
    assert found.token_logprobs.dtype == np.dtype(np.float32)
    assert found.token_ranks.dtype == np.dtype(np.int32)
    entries = expected(PROMPT, 0)[1:]
    own = [entry[0] for entry in entries if entry is not None]
    assert found.token_logprobs.tolist() == [logprob for _, logprob, _ in own]
    assert found.token_ranks.tolist() == [rank for _, _, rank in own]


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    served = Served()
    outputs = served.ask([65], 3)
    assert served.drain() == (1, 0)
    assert outputs[0].prompt_logprobs == [None]


def test_who_wants_none_gets_none() -> None:
    served = Served()
    outputs = served.ask(PROMPT, None)
    assert served.drain() == (70, 0)
    assert outputs[0].prompt_logprobs is None


def test_the_answer_is_the_same_with_and_without() -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"seed": 5, "logprobs": 3, "presence_penalty": 1.0},
    )
    for params in kinds:
        served = Served()
        plain = served.ask(PROMPT, None, max_tokens=12, **params)
        served.drain()
        served = Served(max_num_batched_tokens=16)
        scoring = served.ask(PROMPT, 2, max_tokens=12, **params)
        served.drain()
        assert scoring[0].outputs == plain[0].outputs


def test_what_was_sampled_has_the_log_probabilities_that_it_gets_as_a_prompt() -> None:
    served = Served()
    outputs = served.ask(PROMPT, None, max_tokens=40, logprobs=4)
    served.drain()
    completion = outputs[0].outputs[0]
    assert completion.logprobs is not None
    text = [*PROMPT, *completion.token_ids]
    scoring = served.ask(text, 4)
    # Six full blocks have their hidden states from prompt and decodes.
    assert served.drain() == (110 - 96, 109)
    found = scoring[0].prompt_logprobs
    assert found is not None
    assert [entry_of(one) for one in found[70:]] == [entry_of(one) for one in completion.logprobs]


# ---- With cached prefixes


@pytest.mark.parametrize("length", [2, 3, 15, 16, 17, 18, 31, 32, 33, 48, 64, 65, 70])
@pytest.mark.parametrize("k", [0, 3])
def test_cached_blocks_are_neither_computed_nor_scored_again(length: int, k: int) -> None:
    served = Served()
    prompt = PROMPT[:length]
    assert served.score(prompt, k) == (length, length - 1)
    hits = (length - 1) // 16 * 16
    fills_block = length % 16 == 0  # which is computed again for the last token, but not scored
    for _ in range(2):
        assert served.score(prompt, k) == (length - hits, 0 if fills_block else length - 1 - hits)


def test_a_last_block_serves_prompts_that_go_on_and_larger_k() -> None:
    served = Served()
    assert served.score(PROMPT[:32], 2) == (32, 31)
    assert served.score(PROMPT[:32], 5) == (16, 31)
    assert served.score(PROMPT[:32], 5) == (16, 0)
    # What the block's last position predicts was not known.
    assert served.score(PROMPT[:40], 2) == (8, 8)
    assert served.score(PROMPT[:32], 5) == (16, 0)
    assert served.score(PROMPT[:40], 5) == (8, 8)
    assert served.score([*PROMPT[:32], 251], 5) == (1, 1)


@pytest.mark.parametrize("order", list(itertools.permutations([0, 1, 5, 20])))
def test_k_asked_in_any_order(order: tuple[int, ...]) -> None:
    """More than any before runs the output projection again, and no row; less is there."""
    served, most = Served(), -1
    for turn, k in enumerate(order):
        cold = turn == 0
        rows = 70 if cold else 6
        scores = 69 if k > most else 5
        assert served.score(PROMPT, k) == (rows, scores)
        most = max(most, k)


@pytest.mark.parametrize("k", [kept_scores.MOST_TOP_KEPT + 1, VOCAB_SIZE])
def test_very_many_are_not_kept_but_their_rows_are(k: int) -> None:
    served = Served()
    assert served.score(PROMPT, k) == (70, 69)
    assert served.score(PROMPT, k) == (6, 69)
    assert served.score(PROMPT, 2) == (6, 69)
    assert served.score(PROMPT, 1) == (6, 5)


def test_a_prompt_that_nobody_scored_is_scored_without_its_rows() -> None:
    served = Served()
    served.ask(PROMPT, None)
    served.drain()
    assert served.score(PROMPT, 1) == (6, 69)


@pytest.mark.parametrize("num_same", [0, 1, 15, 16, 17, 47, 48, 63, 64, 65])
def test_partial_hits_and_the_token_after_a_blocks_end(num_same: int) -> None:
    """What a block's last position predicts lies beyond it: that one is scored again where it differs."""
    served = Served()
    served.score(PROMPT, 2)
    other = [*PROMPT[:num_same], *[251] * (70 - num_same)]
    hits = num_same // 16 * 16
    again = 1 if hits and num_same == hits else 0
    assert served.score(other, 2) == (70 - hits, 69 - hits + again)
    assert served.score(PROMPT, 2) == (6, 5)


def test_evicted_blocks_are_computed_and_scored_anew() -> None:
    served = Served(num_blocks=8)
    assert served.score(PROMPT, 2) == (70, 69)
    assert served.score(other_prompt(1, 66), 2) == (66, 65)
    rows, scores = served.score(PROMPT, 2)
    assert served.engine.stats()["prefix_cache_evictions"] > 0
    assert 6 < rows < 70
    assert scores == rows - 1
    # A block that somebody computes again, and who wants no scores, has none of the old one's.
    served = Served(num_blocks=8)
    served.score(PROMPT, 2)
    served.ask(other_prompt(1, 127), None)
    served.drain()
    served.ask(PROMPT, None)
    served.drain()
    assert served.score(PROMPT, 2) == (6, 69)


def test_a_larger_k_after_the_last_blocks_went() -> None:
    served = Served(num_blocks=8)
    served.score(PROMPT, 1)
    served.score(other_prompt(2, 66), 1)
    rows, scores = served.score(PROMPT, 20)
    assert 6 < rows < 70
    assert scores == 69


@pytest.mark.parametrize("ahead", [True, False])
def test_prompts_that_arrive_together_are_computed_once(ahead: bool) -> None:
    served = Served(ahead=ahead)
    prompts = [[*PROMPT[:64], tail, *PROMPT[65:]] for tail in range(6)]
    asks = [served.ask(prompt, 2) for prompt in prompts]
    rows, scores = served.drain()
    assert rows == 70 + 5 * 6
    # The token after the fourth block is each one's own.
    assert scores == 69 + 5 * 6
    for outputs in asks:
        confirm(outputs[0], 2)


def test_completions_of_a_prompt_score_it_once() -> None:
    served = Served()
    outputs = served.ask(PROMPT, 3, n=4, max_tokens=5, temperature=1.0)
    rows, scores = served.drain()
    assert (rows, scores) == (70 + 3 * 6 + 4 * 4, 69)
    confirm(outputs[0], 3)
    assert len({tuple(one.token_ids) for one in outputs[0].outputs}) == 4


def test_a_reset_cache_is_scored_anew() -> None:
    served = Served()
    served.score(PROMPT, 2)
    assert served.engine.reset_prefix_cache()
    assert served.score(PROMPT, 2) == (70, 69)
    assert served.score(PROMPT, 2) == (6, 5)


def test_a_reset_in_the_middle_of_a_prompt() -> None:
    served = Served(max_num_batched_tokens=20)
    outputs = served.ask(PROMPT, 2)
    served.engine.step()
    served.engine.step()
    served.engine.reset_prefix_cache()
    served.drain()
    assert served.device.num_scored == 69
    confirm(outputs[0], 2)
    assert served.score(PROMPT, 2) == (70, 69)


def test_salts_share_no_scores() -> None:
    served = Served()
    salted = {"placing": {"cache_salt": "a"}}
    assert served.score(PROMPT, 2) == (70, 69)
    assert served.score(PROMPT, 2, **salted) == (70, 69)
    assert served.score(PROMPT, 2, **salted) == (6, 5)
    assert served.score(PROMPT, 2, placing={"cache_salt": "b"}) == (70, 69)
    assert served.score(PROMPT, 2) == (6, 5)


def test_without_prefix_caching_everything_is_computed_and_scored() -> None:
    served = Served(caching=False, max_num_batched_tokens=16)
    for k in (2, 2, 5):
        assert served.score(PROMPT, k) == (70, 69)


def test_without_kept_hidden_states_only_scoring_requests_compute_anew() -> None:
    served = Served(keeps_hidden=False)
    for k in (2, 1, 5):
        assert served.score(PROMPT, k) == (70, 69)
    plain = served.ask(PROMPT, None)
    assert served.drain() == (6, 0)
    assert plain[0].num_cached_tokens == 64
    scoring = served.ask(PROMPT, 1)
    served.drain()
    assert scoring[0].num_cached_tokens == 0
