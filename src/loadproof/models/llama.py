"""Llama 2 and 3, and models of the same shape (SmolLM2, TinyLlama)."""

from __future__ import annotations

from loadproof.graph import Graph
from loadproof.models.config import Config
from loadproof.models.decoder import (
    Decoder,
    build_decoder,
    read_activation,
    read_eps,
    read_layers,
    read_sizes,
)


def build(config: Config) -> Graph:
    """A plain decoder, with biases where ``attention_bias`` or ``mlp_bias`` ask for them."""
    sizes = read_sizes(config)
    bias = config.flag("attention_bias", False)
    return build_decoder(
        Decoder(
            sizes=sizes,
            layers=read_layers(config, sizes),
            eps=read_eps(config),
            tied=config.flag("tie_word_embeddings", False),
            activation=read_activation(config),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.flag("mlp_bias", False),
        )
    )
