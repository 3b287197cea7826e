"""Which positions of a prompt have been scored, as seen from outside, and whether as the model says."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tests.simulation.model import Truth, scores_of

from loadproof.engine.block_pool import BlockPool
from loadproof.engine.kept_scores import MOST_TOP_KEPT
from loadproof.engine.prompt_scores import BlockScores, PromptScores
from loadproof.engine.step_plan import Chunk


class ViolationError(AssertionError):
    """Something that must hold does not."""


@dataclass(slots=True, eq=False)
class ScoreBook:
    """Of one request that wants its prompt's log-probabilities: where each of them came from."""

    truth: Truth
    scores: PromptScores
    planned: set[int] = field(default_factory=set)  # positions, the landed ones among them
    landed: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, truth: Truth) -> ScoreBook | None:
        """A request's book; None where it wants no scores."""
        scores = truth.request.prompt_scores
        return None if scores is None else cls(truth, scores)

    @property
    def num_positions(self) -> int:
        """How many there are to score."""
        return self.truth.request.num_prompt_tokens - 1

    @property
    def all_planned(self) -> bool:
        """Whether each has been scored or is on its way."""
        return len(self.planned) == self.num_positions

    def num_landed_from_start(self) -> int:
        """How many positions from the first on have their scores."""
        return next(at for at in range(self.num_positions + 1) if at not in self.landed)

    def admitted(self, known: list[BlockScores | None], size: int) -> int:
        """The request runs, and this is known of its first blocks: how many scores it needs no more."""
        covered: set[int] = set()
        for index, kept in enumerate(known):
            if kept is None or kept.num_top < self.scores.num_top:
                continue
            stop = min((index + 1) * size, self.num_positions)
            if stop == (index + 1) * size and kept.next_token != self.truth.tokens[stop]:
                stop -= 1
            covered |= set(range(index * size, stop))
        num_new = len(covered - self.planned)
        self.planned |= covered
        self.landed |= covered
        return num_new

    def chunk_planned(self, chunk: Chunk, keeps_hidden: bool) -> int:
        """A chunk has been planned: how many positions it scores, none of them for the second time."""
        positions = [] if chunk.scored is None else chunk.scored.tolist()
        key, first = self.truth.request.key, 0 if keeps_hidden else chunk.start
        if positions != sorted(set(positions)):
            raise ViolationError(f"{key} scores {positions}")
        if positions and not first <= positions[0] <= positions[-1] < min(chunk.stop, self.num_positions):
            raise ViolationError(f"{key} scores {positions}, and computes {chunk.start} to {chunk.stop}")
        again = self.planned.intersection(positions)
        if again:
            raise ViolationError(f"{key} scores {sorted(again)} though these are there")
        self.planned.update(positions)
        if chunk.samples and not self.all_planned:
            raise ViolationError(f"{key} samples, and {self.num_positions - len(self.planned)} have no score")
        return len(positions)

    def chunk_landed(self, chunk: Chunk) -> None:
        """A chunk's scores have been taken in."""
        if chunk.scored is not None:
            self.landed.update(chunk.scored.tolist())

    def check_kept(self, chunk: Chunk, pool: BlockPool, size: int) -> None:
        """Blocks on offer that this chunk has completed keep their scores, where these are few."""
        request = self.truth.request
        if chunk.scored is None or self.scores.num_top > MOST_TOP_KEPT:
            return
        for index in {position // size for position in chunk.scored.tolist()}:
            begin, end = index * size, (index + 1) * size
            if index >= request.num_published_blocks or pool.key_of(request.block_ids[index]) is None:
                continue
            here = range(begin, min(end, self.num_positions))
            if end <= request.num_prompt_tokens and self.landed.issuperset(here):
                kept = pool.scores_of(request.block_ids[index])
                least = (self.scores.num_top, len(here))  # wider ones count for more than longer ones
                if kept is None or (kept.num_top, len(kept.logprobs)) < least:
                    raise ViolationError(f"{request.key}: the scores of its block {index} are not kept")

    def restarted(self) -> None:
        """What was on its way will not come."""
        self.planned = set(self.landed)

    def check(self, *, whole: bool) -> None:
        """What has come is what the model says; all of it, where that is due."""
        key, scores = self.truth.request.key, self.scores
        if whole and not (scores.done and len(self.landed) == self.num_positions):
            raise ViolationError(f"{key} has {len(self.landed)} of {self.num_positions} scores")
        at = np.array(sorted(self.landed), np.int64)
        tokens, prefixes = self.truth.tokens, self.truth.prefixes
        expected = scores_of(
            [prefixes[position] for position in at],
            [tokens[position + 1] for position in at],
            [scores.num_top] * len(at),
        )
        for ours, models in (
            (scores.logprobs[at], expected.logprobs),
            (scores.ranks[at], expected.ranks),
            (scores.top_ids[at].reshape(-1), expected.top_ids),
            (scores.top_logprobs[at].reshape(-1), expected.top_logprobs),
        ):
            if ours.tobytes() != models.tobytes():
                raise ViolationError(f"{key}: scores {ours.tolist()}, the model says {models.tolist()}")
