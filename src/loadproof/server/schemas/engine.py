"""``/engine``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from loadproof.server.schemas.base import AnswerModel


class BlockCounts(AnswerModel):
    """The key-value cache's blocks by state; the three states add up to ``total``."""

    total: int
    held: int = Field(description="In use by unfinished requests.")
    cached: int = Field(description="Free, and their contents can be had again.")
    blank: int = Field(description="Free, and nothing worth keeping in them.")


class EngineCounters(AnswerModel):
    """What has happened since the start."""

    num_requests: int
    num_finished: int
    num_aborted: int
    num_steps: int
    num_preemptions: int
    prompt_tokens: int = Field(description="Of requests that have started.")
    generation_tokens: int
    prefix_cache_queries: int = Field(description="Tokens looked for in the cache of prefixes.")
    prefix_cache_hits: int = Field(description="Tokens found there.")
    prefix_cache_evictions: int = Field(description="Cached blocks that were needed for something else.")


class SequenceView(AnswerModel):
    """How far one completion of one request has come, in tokens."""

    request_id: str
    index: int = Field(description="Which of the request's completions.")
    status: Literal["running", "leaving", "waiting"] = Field(description="`leaving` is being preempted.")
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int = Field(description="Most tokens of its output.")
    num_computed_tokens: int = Field(description="Of prompt and output, those in the key-value cache.")
    num_cached_tokens: int = Field(description="Of its prompt, those found in the cache of prefixes.")
    num_blocks: int
    num_preemptions: int


class EngineView(AnswerModel):
    """The engine between two of its steps."""

    model: str
    system_fingerprint: str
    max_model_len: int
    block_size: int = Field(description="Tokens a block.")
    time: float = Field(description="Seconds of a clock that never goes back: rates are differences by it.")
    blocks: BlockCounts
    num_running: int
    num_waiting: int
    counters: EngineCounters
    sequences: list[SequenceView] = Field(
        description="The unfinished ones, those that run first; else in the order of arrival."
    )
    num_left_out: int = Field(description="Unfinished sequences that the list has no room for.")
