"""loadproof: LLM serving whose answer never depends on the load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadproof.config import EngineConfig
    from loadproof.engine.output import CompletionDelta, CompletionOutput, Logprob, RequestOutput
    from loadproof.engine.sampling_params import SamplingParams
    from loadproof.llm import LLM
    from loadproof.perplexity import TextScore
    from loadproof.scoring import ContinuationScore

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionDelta",
    "CompletionOutput",
    "ContinuationScore",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "TextScore",
]

# Importing the package must cost nothing; each name is imported when it is first used.
_HOMES = {
    "LLM": "loadproof.llm",
    "CompletionDelta": "loadproof.engine.output",
    "CompletionOutput": "loadproof.engine.output",
    "ContinuationScore": "loadproof.scoring",
    "EngineConfig": "loadproof.config",
    "Logprob": "loadproof.engine.output",
    "RequestOutput": "loadproof.engine.output",
    "SamplingParams": "loadproof.engine.sampling_params",
    "TextScore": "loadproof.perplexity",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
