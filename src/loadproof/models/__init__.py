"""Model architectures: each file turns a ``config.json`` into a Graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadproof.graph import Graph
from loadproof.models import gemma3, llama, mistral, qwen2, qwen3
from loadproof.models.config import Config, ConfigError, UnknownArchitectureError

__all__ = ["ARCHITECTURES", "ConfigError", "UnknownArchitectureError", "build_graph"]

ARCHITECTURES: dict[str, Callable[[Config], Graph]] = {
    "Gemma3ForCausalLM": gemma3.build,
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}
_BY_MODEL_TYPE = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def build_graph(config: Mapping[str, Any], where: str = "config.json") -> Graph:
    """The Graph of the model that a parsed ``config.json`` describes.

    The architecture is the first of ``architectures``, else that of ``model_type``; ``where`` names the
    config in errors. Raises :class:`UnknownArchitectureError` for one that is not known,
    :class:`ConfigError` for a config that lacks something, holds a wrong value or sets what its
    architecture does not support.
    """
    view = Config(config, where)
    names = view.texts("architectures")[:1]
    model_type = view.text("model_type", "")
    name = names[0] if names else _BY_MODEL_TYPE.get(model_type, model_type)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        named = (
            f"architecture {name[:80]!r} is unknown"
            if name
            else "neither architectures nor model_type is set"
        )
        raise UnknownArchitectureError(f"{where}: {named}; the known ones are {known}")
    graph = ARCHITECTURES[name](view)
    view.refuse_unread(name)
    return graph
