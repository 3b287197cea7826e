"""Gemma 3, text only: scaled embeddings, norms before and behind each part, windows in most layers.

Its norms store the weight minus one. Sliding layers rotate by their own, local, base frequency.
"""

from __future__ import annotations

from loadproof.graph import Graph
from loadproof.models.config import MAX_LAYERS, Config
from loadproof.models.decoder import (
    Decoder,
    Layer,
    Sizes,
    build_decoder,
    read_activation,
    read_eps,
    read_sizes,
    read_windows,
)
from loadproof.models.rope import LAYER_TYPES, read_rope

_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}


def build(config: Config) -> Graph:
    """Gemma's decoder, with softcaps where the config sets them.

    The embedding scale is ``sqrt(hidden_size)`` as a float32 model has it; one that runs in bfloat16
    throughout rounds it (33.94 to 34 for the 1B model).
    """
    sizes = read_sizes(config, _DEFAULTS)
    bias = config.flag("attention_bias", False)
    return build_decoder(
        Decoder(
            sizes=sizes,
            layers=_read_layers(config, sizes),
            eps=read_eps(config),
            tied=config.flag("tie_word_embeddings", True),
            activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
            qkv_bias=bias,
            output_bias=bias,
            qk_norms=True,
            post_norms=True,
            norm_offset=1.0,
            embed_scale=sizes.hidden_size**0.5,
            attention_scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
            attention_softcap=config.optional_positive("attn_logit_softcapping"),
            final_softcap=config.optional_positive("final_logit_softcapping"),
        )
    )


def _read_layers(config: Config, sizes: Sizes) -> list[Layer]:
    parameters = config.section("rope_parameters").keys()
    if parameters and not parameters & set(LAYER_TYPES):
        raise config.error("rope_parameters", "must hold one object for each layer type")
    full = read_rope(config, sizes.head_dim, "full_attention", theta=1e6)
    local = read_rope(
        config,
        sizes.head_dim,
        "sliding_attention",
        theta_key="rope_local_base_freq",
        scaling_key=None,
    )
    period = config.integer("sliding_window_pattern", 6, high=MAX_LAYERS)
    windows = read_windows(config, sizes.num_layers, lambda layer: (layer + 1) % period != 0)
    return [Layer(full) if window is None else Layer(local, window) for window in windows]
