"""Qwen 2 and 2.5: biases on queries, keys and values, and windows in the upper layers where switched on."""

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
    read_layers,
    read_sizes,
)


def build(config: Config) -> Graph:
    """A plain decoder with query, key and value biases."""
    sizes = read_sizes(config)
    if not config.flag("attention_bias", True):
        raise config.error("attention_bias", "is false, but Qwen 2 has biases")
    return build_decoder(
        Decoder(
            sizes=sizes,
            layers=read_qwen_layers(config, sizes),
            eps=read_eps(config),
            tied=config.flag("tie_word_embeddings", False),
            activation=read_activation(config),
            qkv_bias=True,
        )
    )


def read_qwen_layers(config: Config, sizes: Sizes) -> list[Layer]:
    """Layers of which those from ``max_window_layers`` on slide, if ``use_sliding_window`` is set.

    The window's size is in these configs even where it is switched off.
    """
    switched_on = config.flag("use_sliding_window", False)
    first = config.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
    layers = read_layers(config, sizes, slides=lambda layer: switched_on and layer >= first)
    if not switched_on and any(layer.window for layer in layers):
        raise config.error("layer_types", "has sliding layers, but use_sliding_window is not set")
    return layers
