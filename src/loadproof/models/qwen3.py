"""Qwen 3 (dense): norms on each query and key head."""

from __future__ import annotations

from loadproof.graph import Graph
from loadproof.models.config import Config
from loadproof.models.decoder import Decoder, build_decoder, read_activation, read_eps, read_sizes
from loadproof.models.qwen2 import read_qwen_layers


def build(config: Config) -> Graph:
    """A plain decoder with query and key norms; ``head_dim`` is 128 unless the config says otherwise."""
    sizes = read_sizes(config, {"head_dim": 128})
    bias = config.flag("attention_bias", False)
    return build_decoder(
        Decoder(
            sizes=sizes,
            layers=read_qwen_layers(config, sizes),
            eps=read_eps(config),
            tied=config.flag("tie_word_embeddings", False),
            activation=read_activation(config),
            qkv_bias=bias,
            output_bias=bias,
            qk_norms=True,
        )
    )
