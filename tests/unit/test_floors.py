"""Floors against numbers counted by hand, and against the plain definition of what a step computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadproof import floors
from loadproof.bench import WORKLOADS, Workload
from loadproof.floors import AttentionCost, Chunk, Rates, Work
from loadproof.models import build_graph

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
COST = floors.count(build_graph(SMOLLM2_135M))
PREFILL = next(workload for workload in WORKLOADS if workload.name == "prefill")
SLOW = Rates(read_bandwidth=1.0, product_rate=1.0, instruction_rate=1.0)


def test_smollm2_is_counted_as_by_hand() -> None:
    # Queries and output 576 x 576 each, keys and values 192 x 576 each, three of 576 x 1536; 30 layers.
    assert (
        COST.operations_per_token == 30 * 2 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536) == 212_336_640
    )
    assert COST.operations_per_sample == 2 * 49152 * 576 == 56_623_104
    norms = 61 * 576
    assert COST.layer_bytes == 212_336_640 + 2 * norms
    assert COST.output_bytes == 56_623_104
    assert COST.attention == ((AttentionCost(query_width=576, key_width=192, window=None), 30),)


def test_an_untied_output_projection_is_read_instead_of_the_embedding_table() -> None:
    assert floors.count(build_graph({**SMOLLM2_135M, "tie_word_embeddings": False})) == COST


def test_a_decoding_step_reads_the_weights_once_and_each_sequence_its_own_cache() -> None:
    work = COST.step([Chunk(99, 1, True), Chunk(9, 1, True)])
    weights = COST.layer_bytes + COST.output_bytes
    assert work.num_bytes == weights + 23_040 * (99 + 1 + 9 + 1)
    assert work.operations == 2 * (212_336_640 + 56_623_104) + 30 * 4 * 576 * (100 + 10)


def test_the_output_projection_is_left_out_where_nothing_is_sampled() -> None:
    work = COST.step([Chunk(0, 8, False)])
    assert work == Work(8 * 212_336_640 + 30 * 4 * 576 * 36, COST.layer_bytes + 8 * 23_040)
    assert COST.step([]) == Work(0, 0)


@given(first=st.integers(0, 300), count=st.integers(1, 300), window=st.none() | st.integers(1, 400))
def test_attention_counts_the_keys_that_each_query_sees(first: int, count: int, window: int | None) -> None:
    seen = [
        [key for key in range(query + 1) if window is None or key > query - window]
        for query in range(first, first + count)
    ]
    work = AttentionCost(query_width=10, key_width=3, window=window).of(Chunk(first, count, True))
    assert work.operations == 40 * sum(len(keys) for keys in seen)
    read_from_before = [key for key in seen[0] if key < first]
    assert work.num_bytes == 12 * (len(read_from_before) + count)


def test_prefill_fills_the_budget_with_two_prompts_a_step() -> None:
    expected = [[Chunk(0, 1024, True), Chunk(0, 1024, True)]] * 4
    assert list(floors.steps(PREFILL, max_num_batched_tokens=2048)) == expected


def test_prompts_are_split_and_share_steps_with_decodes() -> None:
    assert list(floors.steps(Workload("odd", 2, 5, 3), max_num_batched_tokens=4)) == [
        [Chunk(0, 4, False)],
        [Chunk(4, 1, True), Chunk(0, 3, False)],
        [Chunk(5, 1, True), Chunk(3, 2, True)],
        [Chunk(6, 1, True), Chunk(5, 1, True)],
        [Chunk(6, 1, True)],
    ]


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 12)),
    budget=st.integers(1, 50),
    max_num_seqs=st.integers(1, 6),
)
def test_steps_compute_every_position_once_within_the_limits(
    sizes: tuple[int, int, int], budget: int, max_num_seqs: int
) -> None:
    workload = Workload("any", *sizes)
    taken = list(floors.steps(workload, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs))
    assert all(0 < sum(chunk.num_tokens for chunk in chunks) <= budget for chunks in taken)
    assert all(len(chunks) <= max_num_seqs for chunks in taken)
    computed = [p for chunks in taken for c in chunks for p in range(c.first, c.first + c.num_tokens)]
    expected = list(range(workload.input_len + workload.output_len - 1)) * workload.num_prompts
    assert sorted(computed) == sorted(expected)
    sampled = [chunk for chunks in taken for chunk in chunks if chunk.samples]
    assert len(sampled) == workload.num_prompts * workload.output_len


def test_a_floor_is_the_sum_over_steps_of_what_holds_each_back() -> None:
    rates = Rates(read_bandwidth=42e9, product_rate=1e12, instruction_rate=1e11)
    found = floors.floor(COST, Workload("two", 1, 2048, 2), rates)
    prompt = COST.step([Chunk(0, 2048, True)])
    decode = COST.step([Chunk(2048, 1, True)])
    assert found.num_steps == 2
    assert found.seconds == pytest.approx(prompt.operations / 1e12 + decode.num_bytes / 42e9)
    assert found.operation_seconds == pytest.approx((prompt + decode).operations / 1e12)
    assert found.byte_seconds == pytest.approx((prompt + decode).num_bytes / 42e9)
    assert max(found.operation_seconds, found.byte_seconds) < found.seconds


def test_the_anchor_of_a_single_sequence_is_one_reading_of_the_weights_a_token() -> None:
    # 270 MB a token at 42 GB/s are about 156 tokens a second.
    rates = Rates(read_bandwidth=42e9, product_rate=1e12, instruction_rate=1e12)
    found = floors.floor(COST, Workload("single", 1, 32, 128), rates)
    assert 128 / found.seconds == pytest.approx(156, rel=0.02)


def test_the_better_measurement_counts() -> None:
    assert Rates(1.0, 5.0, 2.0).best(Rates(2.0, 4.0, 3.0)) == Rates(2.0, 5.0, 3.0)
    assert Rates(1.0, 5.0, 2.0).operation_rate == 5.0
    assert Rates(1.0, 2.0, 5.0).operation_rate == 5.0
    assert Rates(1.0, 2.0, 5.0).at_product_rate.operation_rate == 2.0


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        floors.floor(COST, Workload("none", *sizes), SLOW)
    with pytest.raises(ValueError, match="must be positive"):
        floors.floor(COST, PREFILL, SLOW, max_num_batched_tokens=0)
