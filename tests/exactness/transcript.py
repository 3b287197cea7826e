"""What an engine answered, down to the bits of its logits, and where two answers part."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from loadproof import LLM, SamplingParams
from loadproof.devices.device import F32
from loadproof.engine.prompts import TokensPrompt


@dataclass(frozen=True)
class Transcript:
    """One request's answer: an entry a generated token."""

    tokens: list[int]
    logits: list[str]  # digest of the raw float32 row
    logprobs: list[list[tuple[int, float, int]]]  # token id, log-probability and rank


def record(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Transcript]:
    """Answer all prompts in one call."""
    digests: dict[str, list[str]] = {}

    def on_logits(request_id: str, index: int, position: int, logits: F32) -> None:
        digest = hashlib.blake2b(logits.tobytes(), digest_size=16).hexdigest()
        digests.setdefault(request_id, []).append(f"{index}/{position}/{digest}")

    llm.on_logits(on_logits)
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    transcripts = []
    for output in llm.generate(asked, list(params), use_tqdm=False):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        logprobs = [
            [(token, entry.logprob, entry.rank) for token, entry in position.items()]
            for position in completion.logprobs
        ]
        transcripts.append(Transcript(completion.token_ids, digests[output.request_id], logprobs))
    llm.on_logits(None)
    return transcripts


def record_alone(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Transcript]:
    """Answer each prompt in a call of its own."""
    return [record(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]


def first_parting(found: Sequence[Transcript], expected: Sequence[Transcript]) -> str | None:
    """The first prompt and generated token whose answers are not the same in every bit, in words."""
    for prompt, (one, other) in enumerate(zip(found, expected, strict=True)):
        for what in ("logits", "tokens", "logprobs"):
            ours, theirs = getattr(one, what), getattr(other, what)
            for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
                if a != b:
                    return f"prompt {prompt}, generated token {at}: {what} {a}, alone {b}"
            if len(ours) != len(theirs):
                return f"prompt {prompt}: {len(ours)} {what}, alone {len(theirs)}"
    return None
