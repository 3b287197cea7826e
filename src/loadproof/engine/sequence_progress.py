"""How far a sequence has come, for those who watch the engine."""

from __future__ import annotations

from dataclasses import dataclass

from loadproof.engine.request import Request


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """A sequence's place and size at one moment, in tokens, blocks and times."""

    request_id: str
    index: int
    status: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_preemptions: int


def progress_of(request: Request) -> SequenceProgress:
    """A copy of the numbers that a request holds now."""
    return SequenceProgress(
        request_id=request.request_id,
        index=request.index,
        status=request.status.value,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=len(request.output_token_ids),
        max_tokens=request.max_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_blocks=len(request.block_ids),
        num_preemptions=request.num_preemptions,
    )
