"""How much one call may ask for: refused before anything is computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadproof.server.errors import bad_request

if TYPE_CHECKING:
    from loadproof.server.async_engine import Ask
    from loadproof.server.state import ServerState

MOST_PROMPT_ENTRIES = 1 << 20
MOST_OUTPUT_ENTRIES = 1 << 22


def num_entries(state: ServerState, logprobs: int | None) -> int:
    """Log-probabilities that an answer holds of each position, the token's own among them."""
    if logprobs is None:
        return 0
    vocab_size = state.llm.engine.device.vocab_size
    return (vocab_size if logprobs == -1 else min(logprobs, vocab_size)) + 1


def check_prompt_entries(count: int, param: str) -> None:
    """400 for an answer with too many log-probabilities of prompts, repetitions counted."""
    if count > MOST_PROMPT_ENTRIES:
        raise bad_request(
            f"the answer would hold {count} log-probabilities of prompts; "
            f"at most {MOST_PROMPT_ENTRIES} may be in one",
            param,
            "invalid_value",
        )


def check_output_entries(state: ServerState, asks: Sequence[Ask], param: str) -> None:
    """400 for an answer with too many log-probabilities of what is generated."""
    count = 0
    for ask in asks:
        room = max(0, state.llm.max_model_len - len(ask.prompt.token_ids))
        longest = room if ask.params.max_tokens is None else min(room, ask.params.max_tokens)
        count += num_entries(state, ask.params.logprobs) * longest * ask.params.n
    if count > MOST_OUTPUT_ENTRIES:
        raise bad_request(
            f"the answer may hold {count} log-probabilities of generated tokens; "
            f"at most {MOST_OUTPUT_ENTRIES} may be in one",
            param,
            "invalid_value",
        )
