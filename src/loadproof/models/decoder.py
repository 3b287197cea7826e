"""The pre-norm decoder that every supported architecture is a setting of.

A model file reads its config into one :class:`Decoder`, whose fields are the differences between the
architectures; :func:`build_decoder` turns that into a Graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loadproof.graph import Activation, Graph, Param, RopeSpec, Value
from loadproof.models.config import MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, REQUIRED, Config
from loadproof.models.rope import LAYER_TYPES, read_rope

Slides = Callable[[int], bool]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer: the rotary embedding and the window of keys seen."""

    rope: RopeSpec
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """One decoder: its sizes, its layers, and the ways in which architectures differ.

    ``attention_scale`` multiplies the scores and defaults to ``head_dim ** -0.5``. ``post_norms`` adds
    norms behind attention and feed-forward, as Gemma has them.
    """

    sizes: Sizes
    layers: list[Layer]
    eps: float
    tied: bool
    activation: Activation
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norms: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None


def read_sizes(config: Config, defaults: Mapping[str, int] = MappingProxyType({})) -> Sizes:
    """The dimensions in ``config``.

    ``defaults`` are those of transformers' config class, where checkpoints rely on them. Else key-value
    heads are as many as heads, heads share the hidden size between them, and all other keys are required.
    """

    def size(key: str, high: int = MAX_WIDTH) -> int:
        return config.integer(key, defaults.get(key, REQUIRED), high=high)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = config.integer(
        "num_key_value_heads", defaults.get("num_key_value_heads", heads), high=MAX_WIDTH
    )
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    return Sizes(
        vocab_size=size("vocab_size", MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers", MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_read_head_dim(config, hidden, heads, defaults.get("head_dim")),
        max_position_embeddings=size("max_position_embeddings", MAX_POSITIONS),
    )


def _read_head_dim(config: Config, hidden: int, heads: int, default: int | None) -> int:
    if default is None and not config.has("head_dim"):
        if hidden % heads:
            raise config.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
        default = hidden // heads
    head_dim = config.integer("head_dim", default or REQUIRED, low=2, high=1 << 12)
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd, which rotary embeddings do not allow")
    if heads * head_dim > MAX_WIDTH:
        raise config.error("head_dim", f"{head_dim} on {heads} heads is wider than {MAX_WIDTH}")
    return head_dim


def read_eps(config: Config) -> float:
    """The norms' epsilon."""
    return config.positive("rms_norm_eps", 1e-6)


def read_activation(config: Config, key: str = "hidden_act", default: str = "silu") -> Activation:
    """The feed-forward's activation under ``key``."""
    name = config.text(key, default)
    if name not in _ACTIVATIONS:
        raise config.error(key, f"{name!r} is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_windows(config: Config, num_layers: int, slides: Slides | None = None) -> list[int | None]:
    """For each layer the number of keys that a query sees, ``None`` for all before it.

    ``layer_types`` decides where it is given, else ``slides(layer)``, the architecture's pattern if it has
    one.
    """
    kinds = config.texts("layer_types")
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise config.error("layer_types", f"holds {kind!r}, not only {' and '.join(LAYER_TYPES)}")
    if kinds and len(kinds) != num_layers:
        raise config.error("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
    if not kinds and slides is None:
        return [None] * num_layers
    config.acknowledge("sliding_window")  # set in many configs without a sliding layer
    pattern = slides if slides is not None and not kinds else lambda layer: kinds[layer] == LAYER_TYPES[1]
    if not any(map(pattern, range(num_layers))):
        return [None] * num_layers
    window = config.integer("sliding_window", high=MAX_POSITIONS)
    return [window if pattern(layer) else None for layer in range(num_layers)]


def read_layers(config: Config, sizes: Sizes, slides: Slides | None = None) -> list[Layer]:
    """The layers of an architecture whose rotary embedding depends on nothing but the layer's type."""
    windows = read_windows(config, sizes.num_layers, slides)
    kinds = {window: LAYER_TYPES[window is not None] for window in windows}
    ropes = {window: read_rope(config, sizes.head_dim, kind) for window, kind in kinds.items()}
    return [Layer(ropes[window], window) for window in windows]


def build_decoder(decoder: Decoder) -> Graph:
    """The Graph of a whole decoder, under Hugging Face's names."""
    sizes = decoder.sizes
    graph = Graph(sizes.vocab_size, sizes.max_position_embeddings)
    table = Param("model.embed_tokens.weight", (sizes.vocab_size, sizes.hidden_size))
    x = graph.embed(table, decoder.embed_scale)
    for index, layer in enumerate(decoder.layers):
        x = _Block(graph, decoder, layer, f"model.layers.{index}.").run(x)
    x = graph.rms_norm(
        x, Param("model.norm.weight", (sizes.hidden_size,)), decoder.eps, offset=decoder.norm_offset
    )
    head = table if decoder.tied else Param("lm_head.weight", table.shape)
    graph.logits(x, head, decoder.final_softcap)
    return graph.finish()


@dataclass(frozen=True)
class _Block:
    """One decoder layer, appending its ops to ``graph``."""

    graph: Graph
    decoder: Decoder
    layer: Layer
    prefix: str

    def run(self, x: Value) -> Value:
        post = self.decoder.post_norms
        y = self._attention(self._norm(x, "input_layernorm"))
        x = self.graph.add(x, self._norm(y, "post_attention_layernorm") if post else y)
        y = self._mlp(self._norm(x, "pre_feedforward_layernorm" if post else "post_attention_layernorm"))
        return self.graph.add(x, self._norm(y, "post_feedforward_layernorm") if post else y)

    def _norm(self, x: Value, name: str, group: int | None = None) -> Value:
        weight = Param(f"{self.prefix}{name}.weight", (x.width if group is None else group,))
        return self.graph.rms_norm(x, weight, self.decoder.eps, group=group, offset=self.decoder.norm_offset)

    def _linear(self, x: Value, name: str, out: int, bias: bool) -> Value:
        weight = Param(f"{self.prefix}{name}.weight", (out, x.width))
        return self.graph.linear(x, weight, Param(f"{self.prefix}{name}.bias", (out,)) if bias else None)

    def _attention(self, x: Value) -> Value:
        sizes, decoder = self.decoder.sizes, self.decoder
        q_width, kv_width = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        q = self._linear(x, "self_attn.q_proj", q_width, decoder.qkv_bias)
        k = self._linear(x, "self_attn.k_proj", kv_width, decoder.qkv_bias)
        v = self._linear(x, "self_attn.v_proj", kv_width, decoder.qkv_bias)
        if decoder.qk_norms:
            q = self._norm(q, "self_attn.q_norm", sizes.head_dim)
            k = self._norm(k, "self_attn.k_norm", sizes.head_dim)
        scale = decoder.attention_scale
        y = self.graph.attention(
            self.graph.rope(q, self.layer.rope),
            self.graph.rope(k, self.layer.rope),
            v,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5 if scale is None else scale,
            window=self.layer.window,
            softcap=decoder.attention_softcap,
        )
        return self._linear(y, "self_attn.o_proj", sizes.hidden_size, decoder.output_bias)

    def _mlp(self, x: Value) -> Value:
        sizes, bias = self.decoder.sizes, self.decoder.mlp_bias
        gate = self._linear(x, "mlp.gate_proj", sizes.intermediate_size, bias)
        up = self._linear(x, "mlp.up_proj", sizes.intermediate_size, bias)
        y = self.graph.gated_mul(gate, up, self.decoder.activation)
        return self._linear(y, "mlp.down_proj", sizes.hidden_size, bias)
