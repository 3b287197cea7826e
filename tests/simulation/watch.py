"""What must hold in every step, whoever is scheduled: the first thing that does not raises a ViolationError.

Nothing here relies on the scheduler's own counters where a request's truth and the device's cells can tell.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from tests.simulation.device import SimulatedDevice, SimulatedStep
from tests.simulation.model import Truth
from tests.simulation.scores import ScoreBook, ViolationError
from tests.simulation.summary import Summary

from loadproof.devices.device import DeviceLimits, ScoreResult
from loadproof.engine.block_pool import BlockKey
from loadproof.engine.prompt_scores import BlockScores
from loadproof.engine.request import Rank, Request, RequestStatus
from loadproof.engine.scheduler import Scheduler, SchedulerOptions
from loadproof.engine.step_plan import Chunk

BlockName = tuple[str | None, int, int]
"""What a block holds: salt and generation of the request that filled it, and the prefix at its end."""


@dataclass(slots=True, eq=False)
class Subject:
    """A request under watch, and how far its rows should have come."""

    request: Request
    truth: Truth
    admission: int = 0  # the one in which its next row is expected
    generation: int = 0  # of the cache, when it was admitted
    next_start: int = 0  # position that its next row computes
    num_known: int = 0  # tokens: prompt, output, and what submitted steps sample
    newest_step: int = -1
    book: ScoreBook | None = None
    last_scores: BlockScores | None = (
        None  # of a cached block that its last token filled, when it was admitted
    )


class WatchedScheduler(Scheduler):
    """The scheduler itself, each of its plans and results shown to a watch."""

    def __init__(self, limits: DeviceLimits, options: SchedulerOptions, watch: Watch) -> None:
        self._watch = watch
        super().__init__(limits, options)

    def schedule(self) -> list[Chunk]:
        """See :meth:`Scheduler.schedule`."""
        before = [(request, request.num_missing_tokens) for request in self.running]
        chunks = super().schedule()
        self._watch.planned(self, before, chunks)
        return chunks

    def _start(self, request: Request, hits: list[int]) -> None:
        self._watch.starting(self, request, len(hits))
        super()._start(request, hits)

    def retire(self, chunk: Chunk, token_id: int | None, scores: ScoreResult | None = None) -> bool:
        """See :meth:`Scheduler.retire`."""
        num_published, blocks = chunk.request.num_published_blocks, chunk.request.block_ids
        counts = super().retire(chunk, token_id, scores)
        self._watch.landed(self, chunk, num_published, blocks)
        return counts


class Watch:
    """Follows all requests of one scenario; ``summary`` counts what it sees."""

    def __init__(self, limits: DeviceLimits, options: SchedulerOptions, max_stall: int) -> None:
        self.summary = Summary(scenarios=1)
        self.generation = 0  # counts resets of the cache
        self._top_generation = 0  # when the stall began
        self._limits = limits
        self._options = options
        self._max_stall = max_stall
        self._subjects: dict[Request, Subject] = {}
        self._plans: deque[list[Chunk]] = deque()  # not run by the device yet
        self._num_plans = 0
        self._published: dict[int, tuple[BlockKey, BlockName]] = {}  # as seen to be published, by block
        self._ranked: list[tuple[Rank, Request]] = []
        self._top: Request | None = None
        self._stall = 0

    def attach(self, scheduler: WatchedScheduler, device: SimulatedDevice) -> None:
        """Watch these two."""
        self._scheduler, self._device = scheduler, device

    def added(self, truth: Truth) -> None:
        """A request has been handed to the scheduler."""
        request = truth.request
        book = ScoreBook.of(truth)
        self._subjects[request] = Subject(request, truth, num_known=request.num_prompt_tokens, book=book)
        priority = request.priority if self._options.policy == "priority" else 0
        heappush(self._ranked, ((priority, self.summary.requests), request))
        self.summary.requests += 1

    def restarted(self, requests: list[Request]) -> None:
        """These go on from the tokens that they have; nothing that was on its way counts."""
        self._plans.clear()
        self._published.clear()
        for request in requests:
            subject = self._subjects[request]
            subject.num_known = request.num_tokens
            if subject.book is not None:
                subject.book.restarted()
        self._top = None

    def starting(self, scheduler: Scheduler, request: Request, num_hits: int) -> None:
        """A request is about to run: a block that it will compute again for its last token may be cached."""
        subject = self._subjects[request]
        subject.last_scores = None
        if (num_hits + 1) * self._limits.block_size != request.num_tokens:
            return
        block = self._on_offer(scheduler, self._name(subject, num_hits))
        if block is not None:
            subject.last_scores = scheduler.pool.scores_of(block)

    def planned(self, scheduler: Scheduler, before: list[tuple[Request, int]], chunks: list[Chunk]) -> None:
        """A step has been planned; ``before`` are those that ran already, with their missing tokens."""
        size = self._limits.block_size
        num_rows = num_prefill = num_scored = 0
        for chunk in chunks:
            request, start, count, samples, carried, _ = chunk
            subject = self._subjects[request]
            if request.num_admissions != subject.admission:
                self._admitted(scheduler, subject, start)
            self._check_chunk(subject, chunk)
            if subject.book is not None:
                num_scored += subject.book.chunk_planned(chunk, self._limits.keeps_hidden)
            subject.newest_step = self._num_plans
            subject.next_start = start + count
            subject.num_known += samples
            num_rows += count
            num_prefill += count if count > 1 or not samples else 0
            self.summary.carried_rows += carried
        for request in scheduler.running:
            subject = self._subjects[request]
            if request.num_admissions != subject.admission:
                self._admitted(scheduler, subject, request.num_computed_tokens)
        self._check_load(len(chunks), num_rows, num_prefill, any(missing == 1 for _, missing in before))
        if num_scored > self._limits.max_num_batched_tokens:
            raise ViolationError(f"a step scores {num_scored} positions")
        for request, missing in before:
            if request.status is not RequestStatus.RUNNING:
                self._gave_way(request)
            elif missing == 1 and not self._moves(self._subjects[request]):
                full = request.num_computed_tokens == len(request.block_ids) * size
                if num_rows < self._limits.max_num_batched_tokens and not full:
                    raise ViolationError(f"{request.key} decodes, and sits out with budget and block at hand")
        self._follow_top(chunks)
        if chunks:
            self._plans.append(chunks)
            self._num_plans += 1
            self.summary.steps += 1
            self.summary.rows += num_rows
            self.summary.scored += num_scored
            self.summary.chunks_without_rows += sum(not chunk.num_tokens for chunk in chunks)
        self.summary.parked += scheduler.waiting.num_parked > 0

    def before_run(self, step: SimulatedStep) -> None:
        """The device is about to run its oldest step."""
        chunks = [chunk for chunk in self._plans.popleft() if chunk.num_tokens]
        if len(step.lengths) != len(chunks):
            raise ViolationError(f"{len(chunks)} chunks became {len(step.lengths)} sequences")
        wanted = [step.starts[index + 1] - 1 for index, chunk in enumerate(chunks) if chunk.samples]
        if step.logits_rows != wanted or len(step.slots) != len(wanted):
            raise ViolationError(f"logits of rows {step.logits_rows}, and {wanted} sample")
        for index, chunk in enumerate(chunks):
            self._check_sequence(step, index, chunk)
        positions = [chunk.start + chunk.num_tokens for chunk in chunks if chunk.samples]
        if step.sampling.positions.tolist() != positions:
            raise ViolationError(f"sampling at {step.sampling.positions.tolist()}, not at {positions}")

    def landed(self, scheduler: Scheduler, chunk: Chunk, num_published: int, blocks: list[int]) -> None:
        """A chunk's result has been taken in; its request had published so many of its blocks before."""
        size = self._limits.block_size
        subject = self._subjects[chunk.request]
        if subject.book is not None:
            subject.book.chunk_landed(chunk)
            if chunk.request.status is RequestStatus.RUNNING:
                subject.book.check_kept(chunk, scheduler.pool, size)
        for index in range(num_published, chunk.stop // size):
            key = scheduler.pool.key_of(blocks[index])
            if key is not None:
                self._check_contents(subject, index, blocks[index], key)

    def check_scores(self, request: Request, *, whole: bool) -> None:
        """A request's scores are the model's; all of them are there, where that is due."""
        book = self._subjects[request].book
        if book is not None:
            book.check(whole=whole)

    def check_published(self) -> None:
        """Every block on offer was seen to be published when the step that filled it came back."""
        pool = self._scheduler.pool
        for block in range(pool.num_blocks):
            key = pool.key_of(block)
            if key is not None and (block not in self._published or self._published[block][0] is not key):
                raise ViolationError(f"block {block} is offered, though no step that filled it has come back")

    def _admitted(self, scheduler: Scheduler, subject: Subject, start: int) -> None:
        """A request runs from ``start`` on: what lies before must be hits, and no fewer than there are."""
        request, size = subject.request, self._limits.block_size
        num_hits, rest = divmod(start, size)
        if rest or start >= request.num_tokens:
            raise ViolationError(f"{request.key} of {request.num_tokens} tokens starts at {start}")
        for index in range(num_hits):
            block = request.block_ids[index]
            key, name = self._published.get(block, (None, None))
            if key is not scheduler.pool.key_of(block) or name != self._name(subject, index):
                raise ViolationError(f"{request.key} takes block {block} for its own at {index}")
        usable = request.num_tokens - 1
        if subject.book is not None and not self._limits.keeps_hidden:
            usable = min(usable, subject.book.num_landed_from_start())
            if start > usable:
                raise ViolationError(f"{request.key} starts at {start}, and {usable} positions have scores")
        if self._options.enable_prefix_caching and start + size <= usable:
            missed = self._on_offer(scheduler, self._name(subject, num_hits))
            if missed is not None:
                raise ViolationError(f"{request.key} computes what block {missed} holds")
        elif num_hits and not self._options.enable_prefix_caching:
            raise ViolationError(f"{request.key} has hits without a cache")
        if subject.book is not None:
            known = [scheduler.pool.scores_of(block) for block in request.block_ids[:num_hits]]
            known.append(subject.last_scores)
            self.summary.scores_from_cache += subject.book.admitted(known, size)
        subject.admission = request.num_admissions
        subject.generation = self.generation
        subject.next_start = start

    def _on_offer(self, scheduler: Scheduler, wanted: BlockName) -> int | None:
        """The published block that holds this; None if there is none."""
        for block, (key, name) in self._published.items():
            if name == wanted and scheduler.pool.key_of(block) is key:
                return block
        return None

    def _name(self, subject: Subject, index: int) -> BlockName:
        prefix = subject.truth.prefixes[(index + 1) * self._limits.block_size - 1]
        return (subject.request.cache_salt, self.generation, prefix)

    def _check_chunk(self, subject: Subject, chunk: Chunk) -> None:
        request = subject.request
        if request.finished:
            raise ViolationError(f"{request.key} has finished, and is scheduled")
        if subject.newest_step == self._num_plans:
            raise ViolationError(f"{request.key} has two chunks in a step")
        least = 0 if chunk.scored is not None else 1
        if chunk.start != subject.next_start or chunk.num_tokens < least:
            raise ViolationError(f"{request.key} computes {chunk[1:3]}, and {subject.next_start} comes next")
        if chunk.stop > subject.num_known or chunk.samples != (chunk.stop == subject.num_known):
            raise ViolationError(f"{request.key} of {subject.num_known} tokens: {chunk[1:]}")

    def _moves(self, subject: Subject) -> bool:
        """Whether the step that is being looked at has a chunk of a request, or it waits for its scores."""
        scored = subject.book is None or subject.book.all_planned
        return subject.newest_step == self._num_plans or not scored

    def _check_load(self, num_seqs: int, num_rows: int, num_prefill: int, decodes: bool) -> None:
        limits, cap = self._limits, self._options.max_num_prefill_tokens
        if num_rows > limits.max_num_batched_tokens or num_seqs > limits.max_num_seqs:
            raise ViolationError(f"a step of {num_rows} rows of {num_seqs} sequences")
        if decodes and num_prefill > cap:
            raise ViolationError(f"{num_prefill} rows of prompts while others decode, {cap} allowed")

    def _check_sequence(self, step: SimulatedStep, index: int, chunk: Chunk) -> None:
        """One sequence of a step that is about to run: its rows, its blocks and what they hold."""
        request, start = chunk.request, chunk.start
        stop = start + chunk.num_tokens
        truth, size = self._subjects[request].truth, self._limits.block_size
        first, last = step.starts[index : index + 2]
        if step.lengths[index] != stop or last - first != chunk.num_tokens:
            raise ViolationError(f"{request.key}: a sequence of {step.lengths[index]}, {last - first} rows")
        if step.tokens[first:last] != truth.tokens[start:stop]:
            raise ViolationError(f"{request.key}: rows {step.tokens[first:last]} at {start}")
        num_blocks = -(-stop // size)
        blocks = step.tables[index][:num_blocks]
        if request.block_ids[:num_blocks] != blocks:
            raise ViolationError(f"{request.key}: a step touches {blocks}, held are {request.block_ids}")
        pool, cells = self._scheduler.pool, self._device.cells
        for block in blocks[start // size :]:
            if pool.num_holders(block) != 1 or pool.key_of(block) is not None:
                raise ViolationError(f"{request.key}: a step writes block {block}, which is not its own")
        context: list[int] = []
        for block in blocks[: -(-start // size)]:
            context += cells[block * size : (block + 1) * size]
        if context[:start] != truth.prefixes[:start]:
            raise ViolationError(f"{request.key}: the cache does not hold its first {start} tokens")

    def _check_contents(self, subject: Subject, index: int, block: int, key: BlockKey) -> None:
        """A block has been published as the ``index``-th of a request: that is what it must hold."""
        size = self._limits.block_size
        begin, end = index * size, (index + 1) * size
        cells = self._device.cells[block * size : (block + 1) * size]
        if cells != subject.truth.prefixes[begin:end]:
            raise ViolationError(
                f"{subject.request.key}: block {block} is published, and holds something else"
            )
        if key.tokens != array("i", subject.truth.tokens[begin:end]).tobytes():
            raise ViolationError(f"{subject.request.key}: block {block} is published under other tokens")
        name = (subject.request.cache_salt, subject.generation, cells[-1])
        self._published[block] = (key, name)

    def _gave_way(self, request: Request) -> None:
        subject = self._subjects[request]
        self.summary.preemptions += 1
        self.summary.preemptions_in_flight += request.num_steps_in_flight > 0
        book = subject.book
        self.summary.preemptions_in_scoring += book is not None and 0 < len(book.planned) < book.num_positions
        self.summary.preemptions_in_prefill += subject.num_known - subject.next_start > 1

    def _follow_top(self, chunks: list[Chunk]) -> None:
        """The best-ranked unfinished request must not be passed over for long.

        It yields to nobody, so it waits only for steps in flight. Where the cache was reset meanwhile it has
        lost its hits, and the wait for the blocks in their place begins then.
        """
        while self._ranked and self._ranked[0][1].finished:
            heappop(self._ranked)
        top = self._ranked[0][1] if self._ranked else None
        if top is not self._top or self._top_generation != self.generation:
            self._top, self._top_generation, self._stall = top, self.generation, 0
        if top is None or any(chunk.request is top for chunk in chunks):
            self._stall = 0
            return
        self._stall += 1
        if self._stall > self._max_stall:
            raise ViolationError(f"{top.key} ranks best, and is passed over for {self._stall} steps")
