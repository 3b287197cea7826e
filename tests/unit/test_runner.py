"""The arrays of a step, from what the scheduler and the requests say."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fake_device import FakeDevice, small_limits

from loadproof import SamplingParams
from loadproof.devices.device import StepBatch
from loadproof.engine.request import Request, RequestStatus
from loadproof.engine.runner import Runner
from loadproof.engine.scheduler import Scheduler
from loadproof.engine.step_plan import Chunk


class Bench:
    """A scheduler and a runner whose steps the test makes by hand; every one samples token 7."""

    def __init__(self, **limits: int) -> None:
        self.device = FakeDevice(small_limits(**limits))
        self.scheduler = Scheduler(self.device.limits)
        self.runner = Runner(self.device)

    def add(self, name: str, prompt: list[int], **params: object) -> Request:
        settings = SamplingParams(**params)  # type: ignore[arg-type]
        request = Request(name, 0, prompt, settings, 5, 30, frozenset({257}))
        self.scheduler.add(request)
        return request

    def prepare(self) -> tuple[list[Chunk], StepBatch]:
        chunks = self.scheduler.schedule()
        return chunks, self.runner.prepare(chunks)

    def land(self, chunks: list[Chunk], token: int = 7) -> None:
        sampling = [chunk for chunk in chunks if chunk.samples]
        self.runner.record(sampling, np.full(len(sampling), token, np.int32))
        for chunk in chunks:
            self.scheduler.retire(chunk, token if chunk.samples else None)


def test_prompts_and_decodes_in_one_step() -> None:
    bench = Bench(max_num_batched_tokens=24)
    a, b = bench.add("a", list(range(20))), bench.add("b", [50, 51, 52, 53, 54, 55])
    chunks, batch = bench.prepare()
    assert batch.token_ids.tolist() == [*range(20), 50, 51, 52, 53]
    assert batch.query_starts.tolist() == [0, 20, 24]
    assert batch.seq_lens.tolist() == [20, 4]
    assert batch.block_tables.tolist() == [a.block_ids, [*b.block_ids, 0]]
    assert batch.logits_rows.tolist() == [19], "one row, of the request that reached its last token"
    assert batch.sampling.positions.tolist() == [20]
    assert batch.sample_slots.tolist() == [a.slot]
    assert batch.carried_rows.tolist() == []
    bench.land(chunks)
    _, batch = bench.prepare()
    assert batch.token_ids.tolist() == [7, 54, 55]
    assert batch.query_starts.tolist() == [0, 1, 3]
    assert batch.seq_lens.tolist() == [21, 6]
    assert batch.logits_rows.tolist() == [0, 2]
    assert batch.sample_slots.tolist() == [a.slot, b.slot]


def test_a_step_ahead_says_which_rows_it_carries_over() -> None:
    bench = Bench()
    a, b = bench.add("a", [1, 2, 3]), bench.add("b", [4, 5], repetition_penalty=2.0)
    first, _ = bench.prepare()
    bench.add("c", [6, 6, 6, 6])
    second, batch = bench.prepare()
    assert batch.carried_rows.tolist() == [0, 1]
    assert batch.carried_slots.tolist() == [a.slot, b.slot]
    assert batch.token_ids[2:].tolist() == [6, 6, 6, 6]
    # The device puts the carried token at the end of the history that b's penalty looks at.
    assert batch.sampling.history_starts.tolist() == [0, 0, 3, 3]
    assert batch.sampling.history[:2].tolist() == [4, 5]
    assert batch.sampling.num_prompt.tolist() == [0, 2, 0]
    bench.land(first, 8)
    bench.land(second, 9)
    _, batch = bench.prepare()
    assert batch.carried_rows.tolist() == [], "nothing is on its way: the host knows all"
    assert batch.token_ids.tolist() == [9, 9, 9]
    assert batch.sampling.history.tolist() == [4, 5, 8, 9]


def test_rows_that_want_nothing_have_no_history() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3])
    _, batch = bench.prepare()
    assert len(batch.sampling.history) == len(batch.sampling.bias_ids) == 0


def test_a_slots_next_owner_has_nothing_of_the_one_before() -> None:
    bench = Bench(max_num_seqs=1)
    a = bench.add("a", list(range(40)), temperature=0, top_k=3, logit_bias={5: 1.0})
    chunks, _ = bench.prepare()
    slot = a.slot
    bench.land(chunks)
    bench.scheduler.finish(a, "abort")
    b = bench.add("b", [9, 9], temperature=0.5)
    _, batch = bench.prepare()
    assert b.slot == slot
    assert batch.token_ids.tolist() == [9, 9]
    assert batch.block_tables.tolist() == [b.block_ids]
    assert batch.sampling.temperature.tolist() == [0.5]
    assert batch.sampling.top_k.tolist() == [0]
    assert len(batch.sampling.bias_ids) == 0


def test_a_resumed_request_is_loaded_anew_with_all_its_tokens() -> None:
    bench = Bench()
    a = bench.add("a", list(range(17)), frequency_penalty=1.0)
    for token in (8, 9):
        bench.land(bench.prepare()[0], token)
    slot = a.slot
    bench.scheduler.restart([a])
    assert a.status is RequestStatus.WAITING
    _, batch = bench.prepare()
    assert a.slot == slot
    assert batch.token_ids.tolist() == [*range(17), 8, 9], "its very slot, but what it holds is known anew"
    assert batch.logits_rows.tolist() == [18]
    assert batch.sampling.history.tolist() == [*range(17), 8, 9]
    assert batch.sampling.num_prompt.tolist() == [17]


def test_a_request_that_lost_tokens_is_loaded_without_them() -> None:
    bench = Bench()
    a = bench.add("a", [1, 2])
    for token in (8, 9):
        bench.land(bench.prepare()[0], token)
    bench.scheduler.restart([])
    del a.output_token_ids[1:]
    bench.scheduler.restart([a])
    _, batch = bench.prepare()
    assert batch.token_ids.tolist() == [1, 2, 8]
    assert batch.sampling.positions.tolist() == [3]


def test_after_hits_only_the_rest_is_computed_and_one_row_sampled() -> None:
    bench = Bench()
    bench.add("a", list(range(40)))
    bench.land(bench.prepare()[0])
    b = bench.add("b", [*range(40), 1])
    chunks, batch = bench.prepare()
    assert [chunk.request for chunk in chunks][-1] is b
    assert batch.token_ids.tolist()[-9:] == [*range(32, 40), 1]
    assert batch.seq_lens.tolist()[-1] == 41
    assert batch.block_tables[-1].tolist() == b.block_ids
    assert len(batch.logits_rows) == len(chunks)


def test_tables_grow_with_their_requests() -> None:
    bench = Bench()
    a = bench.add("a", list(range(15)))
    widths = []
    for _ in range(20):
        chunks, batch = bench.prepare()
        assert batch.block_tables.tolist() == [a.block_ids]
        widths.append(batch.block_tables.shape[1])
        bench.land(chunks)
    assert widths == [1] * 2 + [2] * 16 + [3] * 2


@pytest.mark.parametrize("return_logits", [True, False])
def test_a_step_that_samples_nothing_has_no_logits_rows(return_logits: bool) -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add("a", list(range(9)))
    batch = bench.runner.prepare(bench.scheduler.schedule(), return_logits)
    assert (len(batch.logits_rows), len(batch.sample_slots), len(batch.sampling.seeds)) == (0, 0, 0)
    assert batch.return_logits is return_logits


@pytest.mark.parametrize("num_done", range(4))
def test_ends_are_banned_until_the_least_length(num_done: int) -> None:
    bench = Bench()
    bench.add("a", [1, 2], min_tokens=2, stop_token_ids=[3], logit_bias={3: 5.0, 4: 1.0})
    for _ in range(num_done):
        bench.land(bench.prepare()[0])
    _, batch = bench.prepare()
    biases = dict(zip(batch.sampling.bias_ids.tolist(), batch.sampling.bias_values.tolist(), strict=True))
    banned = {3: -np.inf, 4: 1.0, 257: -np.inf}
    assert biases == (banned if num_done < 2 else {3: 5.0, 4: 1.0})
