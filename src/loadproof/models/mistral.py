"""Mistral 7B and its successors of the same shape: Llama with a window in every layer, where one is set."""

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
    """A plain decoder; a ``sliding_window`` that is not null holds for every layer."""
    sizes = read_sizes(config)
    windowed = config.has("sliding_window")
    return build_decoder(
        Decoder(
            sizes=sizes,
            layers=read_layers(config, sizes, slides=lambda layer: windowed),
            eps=read_eps(config),
            tied=config.flag("tie_word_embeddings", False),
            activation=read_activation(config),
        )
    )
