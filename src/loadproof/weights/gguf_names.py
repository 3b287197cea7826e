"""GGUF tensor names to Hugging Face names, by architecture, and what the converter changed on the way.

Names on the left are ggml's (``gguf-py/gguf/constants.py``), on the right those of the transformers model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from loadproof.weights.tensors import WeightsError

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+)\.(weight|bias)", re.ASCII)

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """How one ``general.architecture`` corresponds to a transformers model.

    ``interleaved_rope``: rows of ``attn_q`` and ``attn_k`` are stored so that the two members of a rotary
    pair are neighbours, and have to be taken apart into halves again. ``norm_offset`` was added to every
    norm weight by the converter.
    """

    model_type: str
    block_names: dict[str, str]
    interleaved_rope: bool = False
    norm_offset: float = 0.0

    def hugging_face_name(self, name: str) -> str:
        """The transformers name of GGUF tensor ``name``; :class:`WeightsError` where there is none."""
        if name in _TOP:
            return _TOP[name]
        match = _LAYER.fullmatch(name)
        if match is None or match[2] not in self.block_names:
            raise WeightsError(f"tensor {name} has no place in a {self.model_type} model known here")
        return f"model.layers.{match[1]}.{self.block_names[match[2]]}.{match[3]}"


ARCHITECTURES = {
    "llama": Architecture("llama", _BLOCK, interleaved_rope=True),
    "qwen2": Architecture("qwen2", _BLOCK),
    "qwen3": Architecture("qwen3", _BLOCK | _HEAD_NORMS),
    "gemma3": Architecture("gemma3_text", _BLOCK | _HEAD_NORMS | _SANDWICH_NORMS, norm_offset=1.0),
}


def architecture(name: object) -> Architecture:
    """The entry for ``general.architecture``; :class:`WeightsError` naming the known ones otherwise."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise WeightsError(f"GGUF architecture {name!r} is unknown; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
