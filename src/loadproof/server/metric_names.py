"""The metrics there are of the engine and its requests: names, meanings, bounds. The names are vLLM's."""

from __future__ import annotations

from loadproof.server.histogram import (
    FIRST_TOKEN_SECONDS,
    NEXT_TOKEN_SECONDS,
    PARAMS_N,
    REQUEST_SECONDS,
)

ENGINE_GAUGES = {
    "num_running": ("num_requests_running", "Sequences that are being computed."),
    "num_waiting": ("num_requests_waiting", "Sequences that wait in the queue."),
    "num_blocks": ("num_blocks", "Blocks of the key-value cache."),
    "num_free_blocks": ("num_free_blocks", "Blocks that can be had now, cached ones among them."),
    "num_blank_blocks": ("num_blank_blocks", "Free blocks that hold nothing to reuse."),
    "num_cached_blocks": ("num_cached_blocks", "Blocks whose contents can be reused, held or free."),
}
"""By their names in ``Engine.stats``: what is so now."""

ENGINE_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of sequences that have started."),
    "generation_tokens": ("generation_tokens", "Tokens that were generated."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens that were found in the prefix cache."),
    "prefix_cache_evictions": ("prefix_cache_evictions", "Cached blocks that were given to others."),
    "num_preemptions": ("num_preemptions", "Times that a sequence gave its blocks up for others."),
    "num_resumed_with_hits": ("num_resumed_with_hits", "Preempted sequences that found blocks of theirs."),
    "num_sat_out_steps": ("num_sat_out_steps", "Times that a running sequence had no part in a step."),
    "num_steps": ("num_steps", "Steps of the engine."),
    "num_requests": ("num_requests", "Requests that the engine took."),
    "num_finished": ("num_requests_finished", "Requests that ended by themselves."),
    "num_aborted": ("num_requests_aborted", "Requests that were ended: caller gone, or out of time."),
}
"""By their names in ``Engine.stats``: what happened since the start; ``_total`` is added to the names."""

TOKENS = None  # bounds that go by the model's length
HISTOGRAMS: dict[str, tuple[tuple[float, ...] | None, str]] = {
    "time_to_first_token_seconds": (
        FIRST_TOKEN_SECONDS,
        "From a request's arrival to a sequence's first token.",
    ),
    "inter_token_latency_seconds": (NEXT_TOKEN_SECONDS, "From one token of a sequence to the next."),
    "request_time_per_output_token_seconds": (NEXT_TOKEN_SECONDS, "A request's mean time between tokens."),
    "e2e_request_latency_seconds": (REQUEST_SECONDS, "From a request's arrival to its end."),
    "request_queue_time_seconds": (REQUEST_SECONDS, "From a request's arrival to its start."),
    "request_prefill_time_seconds": (REQUEST_SECONDS, "From a request's start to its first token."),
    "request_decode_time_seconds": (REQUEST_SECONDS, "From a request's first token to its last."),
    "request_inference_time_seconds": (REQUEST_SECONDS, "From a request's start to its last token."),
    "request_prompt_tokens": (TOKENS, "Tokens of a request's prompt."),
    "request_prefill_kv_computed_tokens": (TOKENS, "Tokens of a request's prompt that were not cached."),
    "request_generation_tokens": (TOKENS, "Tokens of a sequence."),
    "request_max_num_generation_tokens": (TOKENS, "Tokens of a request's longest sequence."),
    "request_params_n": (PARAMS_N, "The n of requests."),
    "request_params_max_tokens": (TOKENS, "The max_tokens of requests that set it."),
}
"""By name, the bounds and the meaning."""

OLDER_NAMES = {"time_per_output_token_seconds": "inter_token_latency_seconds"}
"""What dashboards made for older versions of vLLM ask for, and its name now."""
