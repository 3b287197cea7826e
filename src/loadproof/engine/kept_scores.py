"""Scores of prompt tokens on their way between requests and the cached blocks that these hold."""

from __future__ import annotations

from loadproof.devices.device import I64
from loadproof.engine.block_pool import BlockPool
from loadproof.engine.prompt_scores import PromptScores
from loadproof.engine.request import Request

MOST_TOP_KEPT = 32
"""Best tokens a position that are kept with a block: about a hundredth of the block's own memory."""


def copy_scores(pool: BlockPool, request: Request, scores: PromptScores, block_size: int) -> None:
    """Take over what is known about the tokens of the cached blocks that a request starts with.

    And of one that is full with the last token, if that is cached: it is computed once more for that
    token's sake, but needn't be scored.
    """
    blocks = request.block_ids
    if request.prefix is not None and (len(blocks) + 1) * block_size == request.num_tokens:
        blocks = [*blocks, *pool.find(request.prefix.keys[-1:])]
    for index, block in enumerate(blocks):
        kept = pool.scores_of(block)
        if kept is not None:
            scores.copy_block(index * block_size, kept)


def keep_scores(
    pool: BlockPool, request: Request, scores: PromptScores, scored: I64, block_size: int
) -> None:
    """Keep what a request has just scored with the published blocks, its own or those of who came first."""
    if request.prefix is None:
        return
    first, last = int(scored[0]) // block_size, int(scored[-1]) // block_size
    for index in range(first, min(last + 1, request.num_published_blocks)):
        block = scores.block(index * block_size, block_size)
        if block is not None and block.num_top <= MOST_TOP_KEPT:
            for published in pool.find(request.prefix.keys[index : index + 1]):
                pool.keep_scores(published, block)
