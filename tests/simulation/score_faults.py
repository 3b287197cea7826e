"""Faults to put into the scoring of prompts; see :mod:`tests.simulation.faults`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.simulation.faults import fault

from loadproof.devices.device import I32, ScoreBatch, ScoreResult
from loadproof.engine import pipeline
from loadproof.engine.block_pool import BlockPool
from loadproof.engine.prompt_scores import BlockScores, PromptScores
from loadproof.engine.request import Request
from loadproof.engine.runner import Runner
from loadproof.engine.scheduler import Scheduler
from loadproof.engine.step_plan import Chunk


@fault
def scores_lost_on_preemption(patch: pytest.MonkeyPatch) -> None:
    let_go = Request.let_go

    def wrong(self: Request) -> None:
        let_go(self)
        if self.prompt_scores is not None and not self.finished:
            self.prompt_scores = PromptScores(self.prompt_token_ids, self.prompt_scores.num_top)

    patch.setattr(Request, "let_go", wrong)


@fault
def scores_in_flight_counted_as_there_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PromptScores) -> None:
        """Forget nothing."""

    patch.setattr(PromptScores, "forget_submitted", wrong)


@fault
def token_after_a_cached_block_taken_for_its_own(patch: pytest.MonkeyPatch) -> None:
    copy_block = PromptScores.copy_block

    def wrong(self: PromptScores, first: int, block: BlockScores) -> None:
        last = min(first + len(block.logprobs), len(self.targets)) - 1
        copy_block(self, first, replace(block, next_token=int(self.targets[last]) if last >= 0 else -1))

    patch.setattr(PromptScores, "copy_block", wrong)


@fault
def scores_of_cached_blocks_left_unused(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PromptScores, first: int, block: BlockScores) -> None:
        """Copy nothing."""

    patch.setattr(PromptScores, "copy_block", wrong)


@fault
def scores_never_kept(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: BlockPool, block: int, scores: BlockScores) -> None:
        """Keep nothing."""

    patch.setattr(BlockPool, "keep_scores", wrong)


@fault
def scores_that_outlive_their_block(patch: pytest.MonkeyPatch) -> None:
    unpublish = BlockPool._unpublish

    def wrong(self: BlockPool, block: int) -> None:
        kept = self._scores.get(block)
        unpublish(self, block)
        if kept is not None:
            self._scores[block] = kept

    patch.setattr(BlockPool, "_unpublish", wrong)
    patch.setattr("loadproof.engine.pipeline.check_integrity", lambda *_: None)
    patch.setattr("loadproof.engine.pipeline.check_idle", lambda *_: None)


@fault
def hits_beyond_what_is_scored_without_hidden_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptScores, "num_done_from_start", lambda self: len(self.targets))


@fault
def prompt_ended_before_it_is_scored(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Scheduler, request: Request, scores: PromptScores, count: int) -> int:
        return count

    patch.setattr(Scheduler, "_num_rows_scored", wrong)


@fault
def hidden_state_of_another_position(patch: pytest.MonkeyPatch) -> None:
    runner_scores = Runner._scores

    def wrong(
        self: Runner, scoring: list[Chunk], computing: list[Chunk], query_starts: I32
    ) -> ScoreBatch | None:
        scores = runner_scores(self, scoring, computing, query_starts)
        if scores is None or not self._limits.keeps_hidden:
            return scores
        rows = np.roll(scores.hidden_rows, 1)
        return replace(scores, hidden_rows=rows)

    patch.setattr(Runner, "_scores", wrong)


@fault
def scores_handed_to_another_request(patch: pytest.MonkeyPatch) -> None:
    def wrong(scores: ScoreResult | None, chunks: list[Chunk]) -> Iterator[ScoreResult]:
        yield from reversed(list(divided(scores, chunks)))

    divided = pipeline._divided
    patch.setattr(pipeline, "_divided", wrong)
