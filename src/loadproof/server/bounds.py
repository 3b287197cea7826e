"""How much one call may ask for: refused before anything is computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadproof.server.errors import bad_request

if TYPE_CHECKING:
    from loadproof.engine.prompts import TokenizedPrompt
    from loadproof.server.async_engine import Ask
    from loadproof.server.state import ServerState

MOST_PROMPT_ENTRIES = 1 << 20
MOST_OUTPUT_ENTRIES = 1 << 22
BYTES_PER_TOKEN = 64
MOST_SCORED_BYTES, MOST_SCORED_IDS = 8 << 20, 4 << 20


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
        )


def check_text(state: ServerState, text: str, param: str) -> None:
    """400 for a text that can't fit, before it is encoded: that would take long, and can't be ended."""
    _check_bytes(state, len(text.encode("utf-8", "surrogatepass")), param)


def check_scored(
    state: ServerState, context: str | list[int], continuations: Sequence[str | list[int]]
) -> int:
    """How many bytes of text and token ids there are to encode; 400 where that is too much.

    The context is encoded with each continuation that is text.
    """
    num_bytes = num_ids = 0
    before = len(context.encode()) if isinstance(context, str) else 0
    for place, part in enumerate(continuations):
        if isinstance(part, str):
            size = before + len(part.encode())
            _check_bytes(state, size, f"continuations[{place}]" if size > before else "context")
            num_bytes += size
        else:
            num_ids += len(part)
        num_ids += 0 if isinstance(context, str) else len(context)
    if num_bytes == 0:
        _check_bytes(state, before, "context")
    for count, most, unit in (
        (num_bytes, MOST_SCORED_BYTES, "bytes"),
        (num_ids, MOST_SCORED_IDS, "token ids"),
    ):
        if count > most:
            raise bad_request(
                f"context and continuations come to {count} {unit}, with the context once for each "
                f"continuation; at most {most} may be in one request",
                "continuations",
            )
    return max(num_bytes, before) + num_ids


def check_room(state: ServerState, prompts: Sequence[TokenizedPrompt], max_tokens: int, param: str) -> None:
    """400 where a prompt and ``max_tokens`` together are more than the model takes, as vLLM answers."""
    limit = state.llm.max_model_len
    for place, prompt in enumerate(prompts):
        count = len(prompt.token_ids)
        if count < limit < count + max_tokens:
            which = "the prompt" if len(prompts) == 1 else f"prompt[{place}]"
            raise bad_request(
                f"{param} {max_tokens} is too large: {which} has {count} tokens, which leaves room for "
                f"{limit - count} in max_model_len {limit}",
                param,
                "context_length_exceeded",
            )


def _check_bytes(state: ServerState, count: int, param: str) -> None:
    most = BYTES_PER_TOKEN * state.llm.max_model_len
    if count > most:
        raise bad_request(
            f"{param} has {count} bytes of text; at most {most} are encoded, {BYTES_PER_TOKEN} for each of "
            f"max_model_len {state.llm.max_model_len} tokens",
            param,
            "context_length_exceeded",
        )
