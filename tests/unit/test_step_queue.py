"""Steps submitted ahead of their results, on the CPU device; and sizes that no plan can have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.exactness.drive import Rows, alone, batch_of, first_difference, greedy
from tests.tiny_models import TINY

from loadproof import _native
from loadproof.devices.cpu import CpuDevice
from loadproof.devices.device import F32, I32, DeviceLimits, StepBatch, StepResult

MODEL = TINY["llama"]
LIMITS = DeviceLimits(max_num_batched_tokens=8, max_num_seqs=3, max_model_len=48, block_size=16, num_blocks=8)
A, B = [1, 2, 3], [4, 5]


def ints(*values: int) -> I32:
    return np.array(values, np.int32)


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=2)
    yield device
    device.close()


def prompts() -> StepBatch:
    """Both prompts; their tokens go to the slots 2 and 0."""
    parts = [Rows(A, 0, 3, [0]), Rows(B, 0, 2, [1])]
    return replace(batch_of(parts, ints(2, 4)), sample_slots=ints(2, 0))


def decodes(after_a: int, after_b: int, **fields: Any) -> StepBatch:
    """The next row of both."""
    batch = batch_of([Rows([*A, after_a], 3, 4, [0]), Rows([*B, after_b], 2, 3, [1])], ints(0, 1))
    return replace(batch, **fields)


BOTH: dict[str, Any] = {"carried_rows": ints(0, 1), "carried_slots": ints(2, 0)}


def logits_of(result: StepResult) -> F32:
    assert result.logits is not None
    return result.logits


@pytest.fixture(scope="module")
def tokens(device: CpuDevice) -> tuple[int, int]:
    """What the model says after each prompt."""
    a, b = device.execute(prompts()).token_ids.tolist()
    assert a != b, "else a mix-up of slots would go unseen"
    return a, b


@pytest.fixture(scope="module")
def expected(device: CpuDevice, tokens: tuple[int, int]) -> F32:
    """Logits of the next rows, their tokens given by the host."""
    device.execute(prompts())
    return logits_of(device.execute(decodes(*tokens)))


@pytest.mark.parametrize("placeholders", [(0, 0), (7, 200)])
def test_carried_rows_give_the_bits_of_the_hosts_tokens(
    device: CpuDevice, expected: F32, tokens: tuple[int, int], placeholders: tuple[int, int]
) -> None:
    first = device.submit(prompts())
    second = device.submit(decodes(*placeholders, **BOTH))
    found = second.result()
    assert first.result().token_ids.tolist() == list(tokens)
    assert first_difference(logits_of(found), expected) is None
    assert found.token_ids.tolist() == expected.argmax(axis=1).tolist()


def test_a_row_gets_the_token_of_its_own_slot(device: CpuDevice, expected: F32) -> None:
    device.submit(prompts())
    found = device.execute(decodes(0, 0, carried_rows=ints(0, 1), carried_slots=ints(0, 2)))
    assert first_difference(logits_of(found)[:1], expected[:1]) is not None
    assert first_difference(logits_of(found)[1:], expected[1:]) is not None


def test_rows_that_are_not_carried_keep_the_hosts_token(
    device: CpuDevice, expected: F32, tokens: tuple[int, int]
) -> None:
    device.submit(prompts())
    found = device.execute(decodes(tokens[0], 0, carried_rows=ints(1), carried_slots=ints(0)))
    assert first_difference(logits_of(found), expected) is None
    device.submit(prompts())
    found = device.execute(decodes(9, 0, carried_rows=ints(1), carried_slots=ints(0)))
    assert first_difference(logits_of(found)[:1], expected[:1]) is not None
    assert first_difference(logits_of(found)[1:], expected[1:]) is None


def test_one_slot_may_feed_several_rows(device: CpuDevice, tokens: tuple[int, int]) -> None:
    device.submit(prompts())
    found = device.execute(decodes(0, 0, carried_rows=ints(0, 1), carried_slots=ints(2, 2)))
    device.execute(prompts())
    given = device.execute(decodes(tokens[0], tokens[0]))
    assert first_difference(logits_of(found), logits_of(given)) is None


def test_a_carried_token_is_the_last_of_its_history(device: CpuDevice, tokens: tuple[int, int]) -> None:
    """A penalty that bars what was said, against a bias towards that very token."""
    said = tokens[0]
    other = (said + 1) % MODEL.graph.vocab_size

    def barring(last: int) -> StepBatch:
        """Whichever was said last is barred; else it is ``said``."""
        sampling = replace(
            greedy(2),
            frequency_penalty=np.array([1000, 0], np.float32),
            history=ints(*A, last),
            history_starts=ints(0, 4, 4),
            num_prompt=ints(3, 0),
            bias_ids=ints(said, other),
            bias_values=np.array([200, 100], np.float32),
            bias_starts=ints(0, 2, 2),
        )
        return decodes(last, tokens[1], sampling=sampling)

    device.execute(prompts())
    assert device.execute(barring(said)).token_ids[0] == other
    assert device.execute(barring(other)).token_ids[0] == said
    device.submit(prompts())
    carried = replace(barring(other), token_ids=ints(0, 0), **BOTH)
    assert device.execute(carried).token_ids[0] == other


CARRIED: dict[str, tuple[dict[str, Any], str]] = {
    "row beyond the step": ({"carried_rows": ints(0, 2)}, "ascend within the step"),
    "negative row": ({"carried_rows": ints(-1, 0)}, "ascend within the step"),
    "rows that descend": ({"carried_rows": ints(1, 0)}, "ascend within the step"),
    "a row twice": ({"carried_rows": ints(1, 1)}, "ascend within the step"),
    "more rows than slots": ({"carried_slots": ints(2)}, "a carried row needs one slot"),
    "more slots than rows": ({"carried_rows": ints()}, "a carried row needs one slot"),
    "slot that wasn't sampled": ({"carried_slots": ints(2, 1)}, "did not sample"),
    "slot beyond all": ({"carried_slots": ints(2, 3)}, "did not sample"),
    "huge slot": ({"carried_slots": ints(2**31 - 1, 0)}, "did not sample"),
    "negative slot": ({"carried_slots": ints(-1, 0)}, "did not sample"),
    "least slot": ({"carried_slots": ints(-(2**31), 0)}, "did not sample"),
    "too few slots to sample into": ({"sample_slots": ints(1)}, "one entry a logits row, or none"),
    "too many slots to sample into": ({"sample_slots": ints(0, 1, 2)}, "one entry a logits row, or none"),
    "a slot sampled into twice": ({"sample_slots": ints(1, 1)}, "distinct and below max_num_seqs"),
    "sampled into a slot beyond all": ({"sample_slots": ints(0, 3)}, "distinct and below max_num_seqs"),
    "sampled into a negative slot": ({"sample_slots": ints(-1, 0)}, "distinct and below max_num_seqs"),
    "a placeholder outside the vocabulary": ({"token_ids": ints(0, 288)}, "outside the vocabulary"),
    "a logits row beyond the step": ({"logits_rows": ints(0, 5)}, "outside the step"),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_malformed_step_is_refused_and_nothing_of_it_kept(
    device: CpuDevice, expected: F32, name: str
) -> None:
    fields, message = CARRIED[name]
    device.submit(prompts())
    with pytest.raises(ValueError, match=message):
        device.submit(decodes(0, 0, **{**BOTH, **fields}))
    # The step before is still the one that samples into its slots.
    assert first_difference(logits_of(device.execute(decodes(0, 0, **BOTH))), expected) is None


@pytest.mark.parametrize("name", ["carried_rows", "carried_slots", "sample_slots"])
@pytest.mark.parametrize("kind", [np.int64, np.float32, np.uint8])
def test_numbers_of_another_type_are_refused(device: CpuDevice, name: str, kind: type) -> None:
    device.submit(prompts())
    with pytest.raises(TypeError, match="incompatible function arguments"):
        device.submit(decodes(0, 0, **{**BOTH, name: np.array([0, 1], kind)}))


def test_only_the_very_step_before_can_be_carried_from(device: CpuDevice) -> None:
    device.submit(prompts())
    device.submit(replace(prompts(), sample_slots=ints()))
    with pytest.raises(ValueError, match="the step before it did not sample"):
        device.submit(decodes(0, 0, **BOTH))
    device.submit(prompts())
    device.submit(decodes(0, 0, sample_slots=ints(1, 2), **BOTH))
    with pytest.raises(ValueError, match="the step before it did not sample"):
        device.submit(decodes(0, 0, **BOTH))


def test_a_devices_first_step_can_carry_nothing() -> None:
    device = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=1)
    for slot in range(3):
        with pytest.raises(ValueError, match="the step before it did not sample"):
            device.submit(decodes(0, 0, carried_rows=ints(0), carried_slots=ints(slot)))
    device.close()


def test_a_step_is_waited_for_once(device: CpuDevice) -> None:
    step = device.submit(prompts())
    step.result()
    with pytest.raises(ValueError, match="a step can be waited for once"):
        step.result()
    with pytest.raises(ValueError, match="no such step was submitted"):
        replace(step, number=step.number + 1).result()


def chain(device: CpuDevice, count: int) -> list[StepBatch]:
    """A prompt, and decodes each of which takes its token from the one before."""
    sequence = [*A, *[0] * count]
    steps = [replace(batch_of([Rows(A, 0, 3, [2, 3, 4])], ints(2)), sample_slots=ints(0))]
    for at in range(3, 3 + count):
        step = batch_of([Rows(sequence, at, at + 1, [2, 3, 4])])
        slot = at % 2
        steps.append(
            replace(step, carried_rows=ints(0), carried_slots=ints(1 - slot), sample_slots=ints(slot))
        )
    return steps


def test_many_steps_run_in_the_order_of_their_submission(device: CpuDevice) -> None:
    submitted = [device.submit(batch) for batch in chain(device, 40)]
    found = [step.result() for step in reversed(submitted)][::-1]
    tokens = [*A, *(int(result.token_ids[0]) for result in found)]
    logits = np.concatenate([logits_of(result) for result in found])
    whole = CpuDevice(MODEL.graph, MODEL.source, replace(LIMITS, max_num_batched_tokens=64), num_threads=1)
    # Its own continuation in one go gives the same bits, so every row had the true token.
    last = batch_of([Rows(tokens, 0, 43, [0, 1, 2])], ints(*range(40, 43)))
    assert first_difference(logits[-3:], logits_of(whole.execute(last))) is None
    assert logits.argmax(axis=1).tolist() == tokens[3:]
    whole.close()


def test_the_callers_arrays_are_the_callers_again_at_once(device: CpuDevice, expected: F32) -> None:
    device.submit(prompts())
    batch = decodes(0, 0, **{name: array.copy() for name, array in BOTH.items()})
    step = device.submit(batch)
    for array in (
        batch.token_ids,
        batch.seq_lens,
        batch.carried_rows,
        batch.carried_slots,
        batch.block_tables,
    ):
        array[...] = -1
    assert first_difference(logits_of(step.result()), expected) is None


def test_threads_submitting_at_once_each_get_their_own_results() -> None:
    device = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=2)
    wide = CpuDevice(MODEL.graph, MODEL.source, replace(LIMITS, max_num_seqs=8), num_threads=1)
    start = threading.Barrier(4)
    sequences = [[place + 1, *range(place, place + 6)] for place in range(4)]
    truth = [alone(wide, tokens)[-3:] for tokens in sequences]

    def use(place: int) -> list[str | None]:
        start.wait(60)
        batch = batch_of([Rows(sequences[place], 0, 7, [place])], ints(4, 5, 6))
        steps = [device.submit(batch) for _ in range(15)]
        return [first_difference(logits_of(step.result()), truth[place]) for step in steps[::-1]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4), timeout=60)) == [[None] * 15] * 4
    device.close()
    wide.close()


def test_closing_runs_what_was_submitted_to_its_end(expected: F32) -> None:
    device = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=2)
    for _ in range(20):
        device.submit(prompts())
    last = device.submit(decodes(0, 0, **BOTH))
    device.close()
    with pytest.raises(ValueError, match="the device is closed"):
        device.submit(prompts())
    assert first_difference(logits_of(last.result()), expected) is None


def test_closing_with_steps_that_nobody_waits_for_ends() -> None:
    for _ in range(5):
        device = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=1)
        for _ in range(10):
            device.submit(prompts())
        device.close()


SIZES = {
    "hidden_size": 64,
    "vocab_size": 288,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 3,
    "max_model_len": 40,
    "block_size": 16,
    "num_blocks": 4,
}
MOST = {
    **dict.fromkeys(("vocab_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len"), 2**24),
    **dict.fromkeys(("hidden_size", "block_size"), 2**20),
}


def plan(**sizes: int) -> _native.Plan:
    return _native.Plan("portable", 1, *{**SIZES, **sizes}.values())


def test_the_sizes_that_the_others_are_made_of_are_taken() -> None:
    assert plan().cache_bytes == 0


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("beyond", ["one more", "all of an int"])
def test_sizes_whose_products_might_overflow_are_refused(name: str, beyond: str) -> None:
    size = MOST[name] + 1 if beyond == "one more" else 2**31 - 1
    with pytest.raises(ValueError, match=f"{name}.* at most 2\\*\\*"):
        plan(**{name: size})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [2**31, 2**32, 2**32 + 16, 2**63, 2**64 + 16, -(2**31) - 1])
def test_sizes_beyond_an_int_never_wrap_round(name: str, size: int) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        plan(**{name: size})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1, -(2**31)])
def test_sizes_below_one_are_refused(name: str, size: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        plan(**{name: size})


@pytest.mark.parametrize("threads", [0, -1, 1025, 2**31 - 1])
def test_numbers_of_threads_are_checked_before_any_starts(threads: int) -> None:
    with pytest.raises(ValueError, match="num_threads must be from 1 to 1024"):
        _native.Plan("portable", threads, *SIZES.values())


@pytest.mark.parametrize(("columns", "k"), [(2**30 + 1, 1), (1, 2**30 + 1), (0, 1), (1, -1)])
def test_matrices_of_impossible_sizes_are_refused(columns: int, k: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 2\\*\\*30 rows and columns"):
        _native.Matrix(columns, k)
