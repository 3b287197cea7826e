"""What a model's ``generation_config`` recommends, as sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# generation_config.json's names that are sampling parameters, and ours for them.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def recommended_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of :class:`~loadproof.engine.sampling_params.SamplingParams` that the config sets."""
    return {
        ours: generation_config[name]
        for name, ours in _NAMES.items()
        if generation_config.get(name) is not None
    }
