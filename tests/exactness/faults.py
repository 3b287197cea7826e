"""Faults that deployed engines had, each put back into the real classes by patching one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from loadproof.devices.device import SamplingBatch, StepBatch, no_rows
from loadproof.engine.completion import Completion, Finish
from loadproof.engine.pipeline import NewToken, Pipeline, StepReport
from loadproof.engine.request import Request, RequestStatus
from loadproof.engine.runner import Runner
from loadproof.engine.scheduler import Scheduler
from loadproof.engine.step_plan import Chunk
from loadproof.tokenizer.stop import StopChecker

Patch = pytest.MonkeyPatch
PutBack = Callable[[Patch], None]
PER_ROW = {f.name for f in fields(SamplingBatch)} - {
    *("history", "history_starts", "bias_ids", "bias_values", "bias_starts")
}


def _after_prepare(patch: Patch, change: Callable[[Runner, list[Chunk], StepBatch], StepBatch]) -> None:
    """Have every step's arrays changed before the device gets them."""
    prepare = Runner.prepare

    def faulty(self: Runner, chunks: list[Chunk], return_logits: bool = False) -> StepBatch:
        return change(self, chunks, prepare(self, chunks, return_logits))

    patch.setattr(Runner, "prepare", faulty)


def _num_logits(chunk: Chunk) -> int:
    """Counted from where the prompt ended once: one for each position that is computed again."""
    resumed_with_hits = chunk.request.num_admissions > 1 and chunk.start > 0
    if not chunk.samples or not resumed_with_hits:
        return int(chunk.samples)
    return max(1, chunk.stop - max(chunk.start, chunk.request.num_prompt_tokens - 1))


def _repeated(sampling: SamplingBatch, counts: Sequence[int]) -> SamplingBatch:
    """Row r's parameters ``counts[r]`` times, for its own position last and for those before it first."""
    rows = np.repeat(np.arange(len(counts)), counts)
    backs = [back for count in counts for back in range(count)[::-1]]
    repeated = {
        f.name: np.repeat(getattr(sampling, f.name), counts) for f in fields(sampling) if f.name in PER_ROW
    }

    def parts(name: str, values: str, cut: bool) -> dict[str, Any]:
        starts, joined = getattr(sampling, name), getattr(sampling, values)
        ends = [max(starts[row], starts[row + 1] - back * cut) for row, back in zip(rows, backs, strict=True)]
        found = [joined[starts[row] : end] for row, end in zip(rows, ends, strict=True)]
        offsets = np.cumsum([0, *map(len, found)], dtype=np.int32)
        return {values: np.concatenate([*found, joined[:0]]), name: offsets}

    return replace(
        sampling,
        **{**repeated, "positions": repeated["positions"] - np.array(backs, np.int64)},
        **parts("history_starts", "history", cut=True),
        **(parts("bias_starts", "bias_values", cut=False) | parts("bias_starts", "bias_ids", cut=False)),
    )


def logits_counted_from_the_prompt(patch: Patch) -> None:
    """A request that resumes with hits samples at each position that it computes again (gaudi #1849)."""

    def change(self: Runner, chunks: list[Chunk], batch: StepBatch) -> StepBatch:
        counts = [_num_logits(chunk) for chunk in chunks if chunk.samples]
        backs = np.concatenate([np.arange(count, dtype=np.int32)[::-1] for count in [*counts, 0]])
        return replace(
            batch,
            logits_rows=np.repeat(batch.logits_rows, counts) - backs,
            sampling=_repeated(batch.sampling, counts),
            sample_slots=np.repeat(batch.sample_slots, counts),
        )

    _after_prepare(patch, change)


def logits_counted_from_the_prompt_past_the_device(patch: Patch) -> None:
    """The same, keeping no token on the device, which would refuse to keep two in one slot."""
    logits_counted_from_the_prompt(patch)
    _after_prepare(patch, lambda _, chunks, batch: replace(batch, sample_slots=no_rows()))


def logits_counted_from_the_prompt_and_nobody_looks(patch: Patch) -> None:
    """The same, past the pipeline and the completion, too: every token sampled is taken in."""
    logits_counted_from_the_prompt_past_the_device(patch)

    def collect(self: Pipeline) -> StepReport:
        flight = self._flights.popleft()
        result = flight.step.result()
        assert result.logits is not None
        new_tokens, at = [], 0
        for chunk in flight.chunks:
            request, count = chunk.request, _num_logits(chunk)
            tokens = result.token_ids[at : at + count].tolist()
            for logits in result.logits[at : at + count]:
                assert self.on_logits is not None
                self.on_logits(request.request_id, request.index, request.num_tokens, logits)
            at += count
            if tokens:
                assert request.slot is not None
                room = self.scheduler.limits.max_model_len - request.num_tokens
                self._runner._tokens[request.slot, request.num_tokens :][: len(tokens)] = tokens[:room]
                request.output_token_ids += tokens[:-1]
            if self.scheduler.retire(chunk, tokens[-1] if tokens else None):
                new_tokens.append(NewToken(request, result.logprobs[at - 1]))
        return StepReport(flight.chunks, new_tokens)

    push = Completion.push

    def push_all(self: Completion, row: Any) -> tuple[str, Finish | None]:
        known = self.request.output_token_ids
        unseen = known[self._num_tokens :]
        del known[self._num_tokens :]
        texts: list[str] = []
        finish = None
        for token in unseen:
            known.append(token)
            text, finish = push(self, row)
            texts.append(text)
            if finish is not None:
                break
        return "".join(texts), finish

    patch.setattr(Pipeline, "_collect", collect)
    patch.setattr(Completion, "push", push_all)


def _decodes(chunks: list[Chunk]) -> list[int]:
    return [i for i, chunk in enumerate(chunks) if 0 < chunk.request.num_prompt_tokens <= chunk.start]


def every_decode_reads_its_slot(patch: Patch) -> None:
    """A request that sat out a step is taken for one that the step before sampled (vllm #26385)."""

    def change(self: Runner, chunks: list[Chunk], batch: StepBatch) -> StepBatch:
        decodes = [i for i in _decodes(chunks) if chunks[i].num_tokens == 1]
        slots = [chunks[i].request.slot for i in decodes]
        rows = batch.query_starts[1:][decodes] - 1
        return replace(batch, carried_rows=rows, carried_slots=np.array(slots, np.int32))

    _after_prepare(patch, change)


def a_row_that_sat_out_is_not_seeded(patch: Patch) -> None:
    """The same, past the device: such a row still holds the token that it decoded from last."""

    def change(self: Runner, chunks: list[Chunk], batch: StepBatch) -> StepBatch:
        token_ids = batch.token_ids.copy()
        for i in _decodes(chunks):
            chunk = chunks[i]
            if chunk.num_tokens == 1 and not chunk.carried and chunk.start > chunk.request.num_prompt_tokens:
                assert chunk.request.slot is not None
                token_ids[batch.query_starts[i]] = self._tokens[chunk.request.slot, chunk.start - 1]
        return replace(batch, token_ids=token_ids)

    _after_prepare(patch, change)


def host_tokens_cut(patch: Patch) -> None:
    """Preempted between chunks, a request comes back without the tokens past its chunk (vllm #28787)."""
    load = Runner._load

    def faulty(self: Runner, slot: int, request: Request) -> None:
        load(self, slot, request)
        self._tokens[slot, max(request.num_prompt_tokens, request.num_computed_tokens) :] = 0

    patch.setattr(Runner, "_load", faulty)


def pending_counted_twice(patch: Patch) -> None:
    """Giving way forgets the token on its way, and its coming is subtracted all the same (vllm #48245)."""
    stop = Scheduler._stop_running

    def faulty(self: Scheduler, request: Request, status: RequestStatus) -> None:
        stop(self, request, status)
        if status is RequestStatus.LEAVING:
            request.num_pending_tokens = 0

    patch.setattr(Scheduler, "_stop_running", faulty)


def placeholders_reach_the_embedding(patch: Patch) -> None:
    """Tokens not known yet are not filled in by the device; the host has zeros there (vllm #40768)."""
    _after_prepare(
        patch, lambda _, chunks, batch: replace(batch, carried_rows=no_rows(), carried_slots=no_rows())
    )


def placeholders_out_of_the_vocabulary(patch: Patch) -> None:
    """The same, with a placeholder that no embedding has."""

    def change(self: Runner, chunks: list[Chunk], batch: StepBatch) -> StepBatch:
        token_ids = batch.token_ids.copy()
        token_ids[batch.carried_rows] = -1
        return replace(batch, token_ids=token_ids)

    _after_prepare(patch, change)


def blocks_freed_under_a_step(patch: Patch) -> None:
    """Whoever stops frees its blocks at once, with a step in flight that writes them (vllm #45357)."""
    stop = Scheduler._stop_running

    def faulty(self: Scheduler, request: Request, status: RequestStatus) -> None:
        stop(self, request, status)
        self.pool.release(request.block_ids)
        request.block_ids = []

    patch.setattr(Scheduler, "_stop_running", faulty)


def blocks_offered_when_allocated(patch: Patch) -> None:
    """A block is a hit for others as soon as somebody means to fill it (vllm #37152)."""
    grow = Scheduler._grow

    def faulty(self: Scheduler, request: Request, count: int, plan: Any) -> int:
        found = grow(self, request, count, plan)
        keys = request.prefix.keys if request.prefix else []
        for index in range(request.num_published_blocks, min(len(keys), len(request.block_ids))):
            self.pool.publish(request.block_ids[index], keys[index])
            self._keep_promise(keys[index], request)
            request.num_published_blocks = index + 1
        return found

    def publish(self: Scheduler, request: Request) -> None:
        """Nothing is left to do."""

    patch.setattr(Scheduler, "_grow", faulty)
    patch.setattr(Scheduler, "_publish", publish)


def penalties_see_placeholders(patch: Patch) -> None:
    """What was sampled ahead of the host is never filled in among the tokens so far (vllm #26467)."""
    patch.setattr(Runner, "record", lambda self, chunks, token_ids: None)


def whoever_asks_wins(patch: Patch) -> None:
    """Any request may take another's blocks and token on its way: two do so for ever (vllm #25538)."""

    def faulty(self: Scheduler, request: Request, num_blocks: int, plan: Any) -> bool:
        victim = next((one for one in self.running if one is not request), None)
        if victim is None:
            return False
        self._stop_running(victim, RequestStatus.LEAVING)
        self._leave_if_landed(victim)
        return True

    retire = Scheduler.retire

    def wasteful(self: Scheduler, chunk: Chunk, token_id: int | None, scores: object = None) -> bool:
        gives_way, counts = chunk.request.status is RequestStatus.LEAVING, retire(self, chunk, token_id)
        if counts and gives_way:
            chunk.request.output_token_ids.pop()
        return counts and not gives_way

    patch.setattr(Scheduler, "_make_way", faulty)
    patch.setattr(Scheduler, "retire", wasteful)


def resumed_taken_for_a_decode(patch: Patch) -> None:
    """A resumed request computes its last token only, over blocks that hold others' (gaudi #524)."""
    start = Scheduler._start

    def faulty(self: Scheduler, request: Request, hits: list[int]) -> None:
        start(self, request, hits)
        if request.num_admissions > 1:
            request.num_computed_tokens = request.num_ready_tokens = request.num_tokens - 1

    patch.setattr(Scheduler, "_start", faulty)


def resumed_with_anothers_blocks(patch: Patch) -> None:
    """A resumed request takes the blocks of whoever had its slot for its own (vllm #27756)."""
    load = Runner._load

    def faulty(self: Runner, slot: int, request: Request) -> None:
        blocks, count = self._blocks[slot].copy(), self._num_blocks[slot]
        load(self, slot, request)
        if request.num_admissions > 1:
            self._blocks[slot], self._num_blocks[slot] = blocks, count

    patch.setattr(Runner, "_load", faulty)


def _before_abort(patch: Patch, act: Callable[[Scheduler, Request], None]) -> None:
    finish = Scheduler.finish

    def faulty(self: Scheduler, request: Request, reason: Any, stop_reason: Any = None) -> None:
        if reason == "abort" and request.status is RequestStatus.RUNNING:
            act(self, request)
        finish(self, request, reason, stop_reason)

    patch.setattr(Scheduler, "finish", faulty)


def freed_by_the_abort_and_by_its_step(patch: Patch) -> None:
    """Blocks are given back when a request is aborted, and once more when its step lands (vllm #42571)."""
    _before_abort(patch, lambda scheduler, request: scheduler.pool.release(request.block_ids))


def a_cancel_frees_what_others_share(patch: Patch) -> None:
    """One client's cancel takes its prefix's blocks from all who hold them (ik_llama.cpp #1929)."""

    def act(scheduler: Scheduler, request: Request) -> None:
        for block in request.block_ids:
            while scheduler.pool.num_holders(block) > 1:
                scheduler.pool.release([block])

    _before_abort(patch, act)


def a_token_comes_after_the_cancel(patch: Patch) -> None:
    """An aborted request gets the token that was on its way, maybe its last, all the same (vllm #29987)."""
    retire = Scheduler.retire

    def faulty(self: Scheduler, chunk: Chunk, token_id: int | None, scores: object = None) -> bool:
        request, counts = chunk.request, retire(self, chunk, token_id)
        if token_id is not None and request.finish_reason == "abort":
            request.output_token_ids.append(token_id)
            return True
        return counts

    patch.setattr(Scheduler, "retire", faulty)


def requests_are_not_measured(patch: Patch) -> None:
    """A prompt longer than the cache is let in, and would wait for ever (vllm #39734)."""
    from loadproof.engine.admission import Door

    patch.setattr(Door, "check_prompt", lambda self, token_ids: list(token_ids))
    patch.setattr(Door, "max_tokens", lambda self, params, num_prompt_tokens: params.max_tokens)


def stops_are_sought_in_pieces(patch: Patch) -> None:
    """A stop string is looked for in each piece of text on its own (vllm #3574)."""
    push = StopChecker.push

    def faulty(self: StopChecker, piece: str) -> str:
        text = push(self, piece)
        text += self.finish()
        self._state = 0
        return text

    patch.setattr(StopChecker, "push", faulty)


def watch_blocks(pipeline: Pipeline, patch: Patch) -> None:
    """No fault: have it raised if a block is handed out that a step on its way writes."""
    written: list[tuple[object, set[int]]] = []
    submit, allocate, size = (
        pipeline._submit,
        pipeline.scheduler.pool.allocate,
        pipeline.scheduler.limits.block_size,
    )

    def watched_submit() -> bool:
        submitted = submit()
        if submitted:
            flight = pipeline._flights[-1]
            parts = [
                chunk.request.block_ids[chunk.start // size : -(-chunk.stop // size)]
                for chunk in flight.chunks
            ]
            written.append((flight, {block for part in parts for block in part}))
        return submitted

    def watched_allocate(count: int) -> list[int]:
        blocks = allocate(count)
        for flight, theirs in written:
            if flight in pipeline._flights:
                assert theirs.isdisjoint(blocks), "a block is handed out while a step writes it"
        return blocks

    patch.setattr(pipeline, "_submit", watched_submit)
    patch.setattr(pipeline.scheduler.pool, "allocate", watched_allocate)
