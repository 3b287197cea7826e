"""Log-probabilities of a prompt's tokens, as they come from steps and from cached blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadproof.devices.device import F32, I32, I64, ScoreResult


class _State:  # no Enum: its class has Python code, and NumPy swallows interrupts that come in there
    MISSING = 0
    SUBMITTED = 1
    DONE = 2


@dataclass(frozen=True, slots=True)
class BlockScores:
    """What scoring found at the positions of one full block, kept with it.

    Entry i is about the token after position i of the block. The last one's lies in the next block, which
    the block's key says nothing about: ``next_token`` is the one that it was scored for. A prompt that ends
    with the block has none, and its last position no entry.
    """

    logprobs: F32  # [block_size], or one less without a next token, like all that follow
    ranks: I32
    top_ids: I32  # [block_size, k]
    top_logprobs: F32  # [block_size, k]
    next_token: int | None

    @property
    def num_top(self) -> int:
        """Best tokens a position: enough for every request that wants no more."""
        return int(self.top_ids.shape[1])

    def says_more_than(self, other: BlockScores) -> bool:
        """Whether these serve requests that the other scores of the same block don't."""
        if self.num_top != other.num_top:
            return self.num_top > other.num_top
        return len(self.logprobs) > len(other.logprobs)


class PromptScores:
    """Of a prompt of P tokens, position ``p < P - 1`` is scored by its row's logits for token ``p + 1``.

    ``num_top`` best tokens are wanted besides. Whatever has come is kept when its request is preempted:
    only what is missing is scored when it resumes.
    """

    def __init__(self, prompt_token_ids: list[int], num_top: int) -> None:
        count = len(prompt_token_ids) - 1
        self.num_top = num_top
        self.targets: I32 = np.array(prompt_token_ids[1:], np.int32)  # [P - 1], like all that follow
        self.logprobs: F32 = np.zeros(count, np.float32)
        self.ranks: I32 = np.zeros(count, np.int32)
        self.top_ids: I32 = np.zeros((count, num_top), np.int32)
        self.top_logprobs: F32 = np.zeros((count, num_top), np.float32)
        self._states: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        self._num_submitted = 0  # positions from the first on of which none is missing

    @property
    def done(self) -> bool:
        """Whether every position has been scored."""
        return bool((self._states == _State.DONE).all())

    def missing(self, stop: int) -> I64:
        """Positions below ``stop`` that no step on its way and no result covers, ascending."""
        first = self._num_submitted
        found: I64 = np.flatnonzero(self._states[first:stop] == _State.MISSING) + first
        if not len(found):
            self._num_submitted = max(first, min(stop, len(self._states)))
        return found

    def num_done_from_start(self) -> int:
        """How many positions from the first on have been scored."""
        undone = np.flatnonzero(self._states != _State.DONE)
        return int(undone[0]) if len(undone) else len(self._states)

    def submit(self, positions: I64) -> None:
        """Note that a step is going to score these."""
        assert (self._states[positions] == _State.MISSING).all(), "a position is scored twice"
        self._states[positions] = _State.SUBMITTED

    def record(self, positions: I64, found: ScoreResult) -> None:
        """Take in a step's result for these positions, each with ``num_top`` best tokens."""
        assert len(positions) == len(found.logprobs)
        self.logprobs[positions] = found.logprobs
        self.ranks[positions] = found.ranks
        self.top_ids[positions] = found.top_ids.reshape(len(positions), self.num_top)
        self.top_logprobs[positions] = found.top_logprobs.reshape(len(positions), self.num_top)
        self._states[positions] = _State.DONE

    def forget_submitted(self) -> None:
        """Count what was on its way as missing: it will never come."""
        self._states[self._states == _State.SUBMITTED] = _State.MISSING
        self._num_submitted = 0

    def copy_block(self, first: int, block: BlockScores) -> None:
        """Take over what a cached block that begins at position ``first`` holds, as far as it serves.

        A request that resumes may hit blocks beyond its prompt: of what it generated, which was another's
        prompt.
        """
        stop = min(first + len(block.logprobs), len(self._states))
        if block.num_top < self.num_top or stop <= first:
            return
        reaches_next = block.next_token is not None and stop == first + len(block.logprobs)
        if reaches_next and self.targets[stop - 1] != block.next_token:
            stop -= 1
        here, there = slice(first, stop), slice(0, stop - first)
        self.logprobs[here] = block.logprobs[there]
        self.ranks[here] = block.ranks[there]
        self.top_ids[here] = block.top_ids[there, : self.num_top]
        self.top_logprobs[here] = block.top_logprobs[there, : self.num_top]
        self._states[here] = _State.DONE

    def block(self, first: int, block_size: int) -> BlockScores | None:
        """What to keep with the full block that begins at ``first``; None until all of it has been scored."""
        stop, count = first + block_size, len(self._states)
        if stop > count + 1:
            return None
        here = slice(first, min(stop, count))
        if (self._states[here] != _State.DONE).any():
            return None
        return BlockScores(
            self.logprobs[here].copy(),
            self.ranks[here].copy(),
            self.top_ids[here].copy(),
            self.top_logprobs[here].copy(),
            int(self.targets[stop - 1]) if stop <= count else None,
        )
