"""What the CPU device refuses, and that it works on afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.exactness.drive import Rows, batch_of, first_difference, greedy, make_device
from tests.tiny_models import BF16, TINY, TinySource

from loadproof import _native
from loadproof.devices.cpu import CpuDevice, choose_isa, default_num_threads
from loadproof.devices.device import F32, I32, DeviceLimits, SamplingBatch, StepBatch
from loadproof.weights.tensors import WeightsError

MODEL = TINY["llama"]
LEVELS = _native.available_levels()
LIMITS = DeviceLimits(max_num_batched_tokens=8, max_num_seqs=3, max_model_len=40, block_size=16, num_blocks=4)


def ints(*values: int) -> I32:
    return np.array(values, np.int32)


# Three rows of one sequence, and the last two of another.
GOOD = batch_of([Rows([1, 2, 3], 0, 3, [2, 0]), Rows([4, 5], 0, 2, [1])], ints(0, 2, 4))


@pytest.fixture(scope="module")
def shared() -> Iterator[CpuDevice]:
    device = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=2)
    yield device
    device.close()


@pytest.fixture(scope="module")
def answer(shared: CpuDevice) -> F32:
    return logits_of(shared)


def logits_of(device: CpuDevice) -> F32:
    logits = device.execute(GOOD).logits
    assert logits is not None
    return logits


def sampling(**fields: Any) -> SamplingBatch:
    return replace(greedy(3), **fields)


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "token beyond the vocabulary": ({"token_ids": ints(1, 2, 288, 4, 5)}, "outside the vocabulary"),
    "negative token": ({"token_ids": ints(1, 2, 3, 4, -1)}, "outside the vocabulary"),
    "more tokens than the budget": (
        {"token_ids": ints(*range(9)), "query_starts": ints(0, 7, 9), "seq_lens": ints(7, 2)},
        "from 1 to max_num_batched_tokens",
    ),
    "starts not from 0": ({"query_starts": ints(1, 3, 5)}, "query_starts must run from 0"),
    "starts not to the end": ({"query_starts": ints(0, 3, 4)}, "query_starts must run from 0"),
    "too few starts": ({"query_starts": ints(0, 5)}, "query_starts must run from 0"),
    "no starts": ({"query_starts": ints()}, "query_starts must run from 0"),
    "a sequence without rows": ({"query_starts": ints(0, 5, 5)}, "length must be from its rows"),
    "descending starts": ({"query_starts": ints(0, 6, 5)}, "length must be from its rows"),
    "length below the rows": ({"seq_lens": ints(2, 2)}, "length must be from its rows"),
    "length beyond the model's": ({"seq_lens": ints(3, 41)}, "length must be from its rows"),
    "negative length": ({"seq_lens": ints(3, -2)}, "length must be from its rows"),
    "block beyond the cache": ({"block_tables": ints(2, 0, 4, 0).reshape(2, 2)}, "outside the cache"),
    "negative block": ({"block_tables": ints(-1, 0, 1, 0).reshape(2, 2)}, "outside the cache"),
    "table shorter than its sequence": ({"seq_lens": ints(3, 33)}, "shorter than its sequence"),
    "table of no blocks": ({"block_tables": np.zeros((2, 0), np.int32)}, "shorter than its sequence"),
    "tables for too few sequences": ({"block_tables": np.zeros((1, 2), np.int32)}, "must be"),
    "tables for too many sequences": ({"block_tables": np.zeros((3, 2), np.int32)}, "must be"),
    "logits row beyond the step": ({"logits_rows": ints(0, 2, 5)}, "outside the step"),
    "negative logits row": ({"logits_rows": ints(-1, 2, 4)}, "outside the step"),
    "more logits rows than sequences allowed": (
        {"logits_rows": ints(0, 1, 2, 3), "sampling": greedy(4)},
        "more logits rows than max_num_seqs",
    ),
    "sampling of too few rows": ({"sampling": greedy(2)}, "one entry a logits row"),
    "one short sampling array": ({"sampling": sampling(top_k=ints(0, 0))}, "one entry a logits row"),
    "history starts that descend": (
        {"sampling": sampling(history=ints(5, 6), history_starts=ints(0, 2, 1, 2))},
        "starts must ascend",
    ),
    "history starts beyond the list": (
        {"sampling": sampling(history_starts=ints(0, 0, 0, 5))},
        "starts must",
    ),
    "history token beyond the vocabulary": (
        {"sampling": sampling(history=ints(288), history_starts=ints(0, 1, 1, 1))},
        "outside the vocabulary",
    ),
    "more prompt than history": ({"sampling": sampling(num_prompt=ints(1, 0, 0))}, "impossible lengths"),
    "bias token beyond the vocabulary": (
        {
            "sampling": sampling(
                bias_ids=ints(-1), bias_values=np.ones(1, np.float32), bias_starts=ints(0, 1, 1, 1)
            )
        },
        "outside the vocabulary",
    ),
    "bias without its value": (
        {"sampling": sampling(bias_ids=ints(3), bias_starts=ints(0, 1, 1, 1))},
        "one value an id",
    ),
    "more logprobs than tokens": ({"sampling": sampling(num_logprobs=ints(289, -1, -1))}, "more logprobs"),
    "more sequences than allowed": (
        {
            "token_ids": ints(1, 2, 3, 4),
            "query_starts": ints(0, 1, 2, 3, 4),
            "seq_lens": ints(1, 1, 1, 1),
            "block_tables": ints(0, 1, 2, 3).reshape(4, 1),
            "logits_rows": ints(0, 1, 2),
        },
        "from 1 to max_num_seqs",
    ),
    "nothing": (
        {
            "token_ids": ints(),
            "query_starts": ints(0),
            "seq_lens": ints(),
            "block_tables": np.zeros((0, 1), np.int32),
            "logits_rows": ints(),
            "sampling": greedy(0),
        },
        "from 1 to max_num_batched_tokens",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_batch_is_refused_and_leaves_no_trace(shared: CpuDevice, answer: F32, name: str) -> None:
    fields, message = MALFORMED[name]
    with pytest.raises(ValueError, match=message):
        shared.execute(replace(GOOD, **fields))
    assert first_difference(logits_of(shared), answer) is None


WRONG_TYPES: dict[str, dict[str, Any]] = {
    "list": {"token_ids": [1, 2, 3, 4, 5]},
    "none": {"seq_lens": None},
    "two dimensions": {"token_ids": ints(1, 2, 3, 4, 5).reshape(1, 5)},
    "one dimension": {"block_tables": ints(0, 1)},
    "text": {"logits_rows": np.array(["0", "2", "4"])},
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_are_refused(shared: CpuDevice, answer: F32, name: str) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        shared.execute(replace(GOOD, **WRONG_TYPES[name]))
    assert first_difference(logits_of(shared), answer) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": np.array([1, 2, 2**32 + 3, 4, 5])},
        {"token_ids": np.array([1.0, 2.0, 3.7, 4.0, 5.0])},
        {"sampling": sampling(seeds=np.array([-1.0, 0.0, 0.5]))},
    ],
    ids=["token wraps round", "token is a fraction", "seed is a fraction"],
)
def test_numbers_of_another_type_are_never_cut_to_fit(shared: CpuDevice, fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        shared.execute(replace(GOOD, **fields))


def test_unused_entries_of_a_table_are_never_looked_at(shared: CpuDevice, answer: F32) -> None:
    tables = ints(2, -7, 1, 10**9).reshape(2, 2)
    logits = shared.execute(replace(GOOD, block_tables=tables)).logits
    assert logits is not None
    assert first_difference(logits, answer) is None


def test_a_step_may_want_no_logits(shared: CpuDevice) -> None:
    result = shared.execute(replace(GOOD, logits_rows=ints(), sampling=greedy(0)))
    assert result.token_ids.shape == (0,)
    assert result.logprobs == []
    assert result.logits is not None
    assert result.logits.shape == (0, MODEL.graph.vocab_size)


def test_logits_only_where_asked_for(shared: CpuDevice) -> None:
    assert shared.execute(replace(GOOD, return_logits=False)).logits is None


def test_results_outlive_the_next_step(shared: CpuDevice) -> None:
    first = shared.execute(GOOD)
    assert first.logits is not None
    logits, tokens = first.logits.copy(), first.token_ids.copy()
    shared.execute(replace(GOOD, token_ids=ints(9, 9, 9, 9, 9)))
    np.testing.assert_array_equal(first.logits, logits)
    np.testing.assert_array_equal(first.token_ids, tokens)


def test_greedy_tokens_and_logprobs_are_of_the_logits(shared: CpuDevice, answer: F32) -> None:
    result = shared.execute(replace(GOOD, sampling=sampling(num_logprobs=ints(2, -1, 0))))
    assert result.token_ids.tolist() == answer.argmax(axis=1).tolist()
    first, none, last = result.logprobs
    assert none is None
    assert first is not None
    assert last is not None
    exact = answer.astype(np.float64)
    logprobs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert first.top_ids.tolist() == np.argsort(-answer[0], kind="stable")[:2].tolist()
    np.testing.assert_allclose(first.top_logprobs, logprobs[0][first.top_ids], atol=1e-5)
    assert last.token_rank == 1
    assert last.top_ids.shape == (0,)
    assert last.token_logprob == pytest.approx(logprobs[2].max(), abs=1e-5)


def test_a_closed_device_refuses_to_run() -> None:
    device = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=1)
    assert device.cache_bytes > 0
    device.close()
    device.close()
    with pytest.raises(ValueError, match="the device is closed"):
        device.execute(GOOD)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"isa": "mmx"}, "'mmx' is not one of this machine's: .*portable"),
        ({"num_threads": 0}, "num_threads must be from 1 to 1024"),
        ({"num_threads": -3}, "num_threads must be from 1 to 1024"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CpuDevice(MODEL.graph, MODEL.source, LIMITS, **settings)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        *(({"block_size": size}, "block_size must be") for size in (-16, 0, 8, 24, 48, 96, 384, 768)),
        *(({name: 0}, "must be positive") for name in ("max_num_batched_tokens", "max_num_seqs")),
        *(({name: -1}, "must be positive") for name in ("max_model_len", "num_blocks")),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CpuDevice(MODEL.graph, MODEL.source, replace(LIMITS, **limits), num_threads=1)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 512, 1024])
def test_every_allowed_block_size_gives_the_same(answer: F32, block_size: int) -> None:
    limits = replace(LIMITS, block_size=block_size)
    device = CpuDevice(MODEL.graph, MODEL.source, limits, num_threads=2)
    assert first_difference(logits_of(device), answer) is None
    device.close()


def test_a_cache_beyond_memory_is_refused() -> None:
    limits = replace(LIMITS, block_size=1024, num_blocks=2**31 - 1, keeps_hidden=False)
    with pytest.raises(MemoryError):
        CpuDevice(MODEL.graph, MODEL.source, limits, num_threads=1)
    with pytest.raises(ValueError, match=r"the cache holds at most 2\*\*31 - 1 positions"):
        CpuDevice(MODEL.graph, MODEL.source, replace(limits, keeps_hidden=True), num_threads=1)


def test_the_level_is_the_argument_then_the_environments_then_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOADPROOF_ISA", raising=False)
    assert choose_isa() == LEVELS[0]
    monkeypatch.setenv("LOADPROOF_ISA", "portable")
    assert choose_isa() == "portable"
    assert choose_isa(LEVELS[0]) == LEVELS[0]
    device = make_device(MODEL.graph, MODEL.source, "")
    assert device.isa == "portable"
    device.close()
    monkeypatch.setenv("LOADPROOF_ISA", "neon9")
    with pytest.raises(ValueError, match="'neon9' is not one of"):
        choose_isa()


def test_levels_end_with_the_one_that_runs_everywhere() -> None:
    order = ["amx", "avx512_bf16", "avx512", "avx2", "portable"]
    assert [level for level in order if level in LEVELS] == LEVELS
    assert LEVELS[-1] == "portable"


def test_all_processors_are_used_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_num_threads() >= 1
    monkeypatch.setattr("loadproof.devices.cpu.default_num_threads", lambda: 3)
    device = CpuDevice(MODEL.graph, MODEL.source, LIMITS)
    assert device.num_threads == 3
    device.close()


def test_a_fingerprint_names_weights_and_level() -> None:
    def fingerprint(name: str, isa: str) -> str:
        device = make_device(TINY[name].graph, TINY[name].source, isa)
        device.close()
        return device.fingerprint

    assert fingerprint("llama", "portable") == fingerprint("llama", "portable")
    found = {fingerprint(name, isa) for name in ("llama", "llama-bias") for isa in LEVELS}
    assert len(found) == 2 * len(LEVELS)


class Changed:
    """A checkpoint with a tensor of another shape, or without it, that must not be read."""

    def __init__(self, source: TinySource, name: str, shape: tuple[int, ...] | None) -> None:
        self._shapes = dict(source.shapes())
        if shape is None:
            del self._shapes[name]
        else:
            self._shapes[name] = shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> BF16:
        raise AssertionError(f"{name} was read from a checkpoint that does not fit")

    def read_bf16(self, name: str) -> BF16:
        return self.read(name)

    def digest(self) -> str:
        return "changed"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.norm.weight", None, "model.norm.weight is missing"),
        ("model.layers.1.self_attn.q_proj.weight", (64, 63), r"q_proj.weight has shape \(64, 63\), not"),
        ("model.embed_tokens.weight", (2**40, 64), "embed_tokens.weight has shape"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_unread(
    name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        CpuDevice(MODEL.graph, Changed(MODEL.source, name, shape), LIMITS)


def test_a_good_batch_is_what_the_others_are_made_of() -> None:
    assert isinstance(GOOD, StepBatch)
    assert GOOD.query_starts.tolist() == [0, 3, 5]
    assert GOOD.block_tables.tolist() == [[2, 0], [1, 0]]
