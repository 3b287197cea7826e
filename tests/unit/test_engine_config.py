from __future__ import annotations

from typing import Any

import pytest

from loadproof.config import (
    LOGPROBS_MODES,
    ConfigError,
    EngineConfig,
    cache_bytes_per_token,
    hidden_bytes_per_token,
    parse_bytes,
    weight_bytes,
)
from loadproof.graph import Graph, Param


def _graph(max_position_embeddings: int = 1024) -> Graph:
    graph = Graph(100, max_position_embeddings)
    x = graph.embed(Param("embed", (100, 64)))
    for layer in range(3):
        q = graph.linear(x, Param(f"q{layer}", (64, 64)))
        k = graph.linear(x, Param(f"k{layer}", (32, 64)))
        v = graph.linear(x, Param(f"v{layer}", (32, 64)))
        x = graph.attention(q, k, v, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    graph.logits(x, Param("embed", (100, 64)))
    return graph.finish()


KEYS_AND_VALUES = 3 * 2 * 2 * 16 * 2
HIDDEN = 96 * 2  # 64 elements take an odd number of 32
BYTES_A_TOKEN = KEYS_AND_VALUES + HIDDEN
PLENTY = 1 << 40


def test_sizes_follow_from_the_graph() -> None:
    assert cache_bytes_per_token(_graph()) == KEYS_AND_VALUES
    assert hidden_bytes_per_token(_graph()) == HIDDEN
    assert weight_bytes(_graph()) == 2 * (112 * 64 + 3 * (64 * 64 + 2 * 32 * 64))


def test_the_cache_is_at_most_what_all_sequences_need() -> None:
    limits = EngineConfig(model="m", max_num_seqs=5).limits(_graph(), PLENTY)
    assert limits.max_model_len == 1024
    assert limits.num_blocks == 5 * 1024 // 32


def test_a_length_not_given_is_what_the_cache_holds() -> None:
    config = EngineConfig(model="m", kv_cache_memory=BYTES_A_TOKEN * 100)
    limits = config.limits(_graph(), PLENTY)
    assert limits.num_blocks == 3
    assert limits.max_model_len == 96


def test_without_hidden_states_the_same_memory_holds_more() -> None:
    settings: dict[str, Any] = {"model": "m", "kv_cache_memory": BYTES_A_TOKEN * 96}
    kept = EngineConfig(**settings).limits(_graph(), PLENTY)
    assert (kept.keeps_hidden, kept.num_blocks) == (True, 3)
    bare = EngineConfig(**settings, prompt_logprobs_cache=False).limits(_graph(), PLENTY)
    assert (bare.keeps_hidden, bare.num_blocks) == (False, 96 * BYTES_A_TOKEN // (32 * KEYS_AND_VALUES))
    least = EngineConfig(model="m", kv_cache_memory=32 * KEYS_AND_VALUES, prompt_logprobs_cache=False)
    assert least.limits(_graph(), PLENTY).num_blocks == 1


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_the_device_is_told_what_log_probabilities_are_of(mode: str) -> None:
    assert EngineConfig(model="m", logprobs_mode=mode).limits(_graph(), PLENTY).logprobs_mode == mode


def test_a_length_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="2000 is above the model's limit of 1024"):
        EngineConfig(model="m", max_model_len=2000).limits(_graph(), PLENTY)
    with pytest.raises(ConfigError, match="1000 does not fit the key-value cache, which holds 64 tokens"):
        EngineConfig(model="m", max_model_len=1000, num_blocks_override=2).limits(_graph(), PLENTY)


def test_blocks_can_be_set() -> None:
    limits = EngineConfig(model="m", num_blocks_override=77, block_size=16).limits(_graph(), PLENTY)
    assert (limits.num_blocks, limits.block_size, limits.max_model_len) == (77, 16, 1024)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_blocks_override", 100), ("kv_cache_memory", 100 * 32 * BYTES_A_TOKEN)],
)
def test_a_cache_that_was_set_has_to_fit_the_memory(name: str, value: int) -> None:
    settings: dict[str, Any] = {"model": "m", name: value}
    config, needed = EngineConfig(**settings), 100 * 32 * BYTES_A_TOKEN
    enough = needed + weight_bytes(_graph())
    assert config.limits(_graph(), enough).num_blocks == 100
    with pytest.raises(
        ConfigError, match=f"{name} asks for .* {needed} bytes; {needed - 1} are available beside the weights"
    ):
        config.limits(_graph(), enough - 1)
    with pytest.raises(ConfigError, match="; 0 are available beside"):
        config.limits(_graph(), weight_bytes(_graph()))


def test_weights_that_exceed_the_memory_are_refused_with_both_numbers() -> None:
    needed = weight_bytes(_graph())
    with pytest.raises(ConfigError, match=f"weights take {needed} bytes; {needed - 1} are available"):
        EngineConfig(model="m").limits(_graph(), needed - 1)


def test_narrow_weights_count_as_wide_as_they_are_kept() -> None:
    graph = Graph(17, 8)
    graph.logits(
        graph.rms_norm(graph.embed(Param("embed", (17, 2))), Param("norm", (2,)), 1e-6),
        Param("embed", (17, 2)),
    )
    assert weight_bytes(graph.finish()) == 2 * 32 * 32 + 4 * 2


def test_a_very_long_limit_has_to_be_set() -> None:
    graph = _graph(1 << 24)
    assert EngineConfig(model="m").limits(graph, PLENTY).max_model_len == 262144
    assert EngineConfig(model="m", max_model_len=1 << 20).limits(graph, PLENTY).max_model_len == 1 << 20


def test_a_cache_below_one_block_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=f"has 100 bytes; one block of 32 tokens takes {32 * BYTES_A_TOKEN}"
    ):
        EngineConfig(model="m", kv_cache_memory=100).limits(_graph(), PLENTY)


def test_a_machine_short_of_memory_still_gets_a_small_cache() -> None:
    limits = EngineConfig(model="m").limits(_graph(1 << 30), weight_bytes(_graph()))
    assert limits.num_blocks == (128 << 20) // (32 * BYTES_A_TOKEN)
    assert limits.max_model_len == 32 * limits.num_blocks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 3),
        ("served_model_name", 5),
        ("served_model_name", ""),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 2.5),
        ("block_size", 24),
        ("block_size", 0),
        ("num_blocks_override", 0),
        ("kv_cache_memory", -1),
        ("kv_cache_memory", "4GiB"),
        ("max_model_len", 1),
        ("num_threads", 0),
        ("seed", 2**64),
        ("max_logprobs", -2),
        ("prompt_logprobs_cache", 1),
        ("logprobs_mode", "raw"),
        ("logprobs_mode", None),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name: str, value: Any) -> None:
    settings = {"model": "m", name: value}
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**settings)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no such settings: tensor_parallel_size; there are .*max_num_seqs"
    ):
        EngineConfig.of("m", {"tensor_parallel_size": 2})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("17", 17),
        ("4GiB", 4 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("2k", 2000),
        ("1G", 10**9),
        ("2TB", 2 * 10**12),
        ("0.5TiB", 1 << 39),
    ],
)
def test_sizes_in_words(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 apples", "-1G", "nan", "1e30", "inf", "4PB", "TI", "4ITB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)
