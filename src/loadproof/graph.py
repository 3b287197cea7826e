"""The op set and :class:`Graph`: the seam between models and devices.

A model file composes these ops once, at load; a device turns the finished graph into a plan and runs it
for any number of tokens. An op says *what* is computed per token, never how: fusion, layout, precision
and threads belong to the device.

Every :class:`Value` is a ``[num_tokens, width]`` activation. Every :class:`Param` names one tensor of the
checkpoint by its Hugging Face name, with the shape it must have; readers of other formats translate their
names to these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True)
class Param:
    """A checkpoint tensor: its Hugging Face name and the shape it must have (``[out, in]`` for matrices)."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """The ``[num_tokens, width]`` result of one op; ``index`` is the op's place in ``Graph.ops``."""

    index: int
    width: int


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    ``kind`` is ``"linear"`` (positions divided by ``factor``) or ``"llama3"`` (frequencies divided by
    ``factor`` below ``low_freq_factor`` wavelengths per ``original_max_position_embeddings``, kept above
    ``high_freq_factor``, blended between; Llama 3.1 model card).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the whole head, halves rotated against each other (NeoX order).

    Pair ``i`` of ``head_dim / 2`` turns by ``position * theta ** (-2 i / head_dim)``, after ``scaling``.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class Embed:
    """``weight[token_id] * scale``; weight is ``[vocab_size, hidden_size]``."""

    weight: Param
    scale: float = 1.0


@dataclass(frozen=True)
class Linear:
    """``x @ weight.T + bias``; weight is ``[out, in]``, bias ``[out]``."""

    x: Value
    weight: Param
    bias: Param | None = None


@dataclass(frozen=True)
class RmsNorm:
    """``x / sqrt(mean(x**2) + eps) * (weight + offset)`` over groups of ``group`` elements of each row.

    ``group`` is the row width for a layer norm and ``head_dim`` for a per-head norm; weight is ``[group]``.
    ``offset`` is 1 for models that store the weight minus one (Gemma), else 0.
    """

    x: Value
    weight: Param
    eps: float
    group: int
    offset: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Each head of ``x`` (``[num_tokens, heads * head_dim]``) rotated by its token's position."""

    x: Value
    spec: RopeSpec


@dataclass(frozen=True)
class Attention:
    """Causal grouped-query attention of ``q`` over keys and values at positions ``0..t`` of its sequence.

    ``q`` is ``[num_tokens, num_heads * head_dim]``; ``k`` and ``v`` are ``[num_tokens, num_kv_heads *
    head_dim]``; head ``h`` reads key head ``h // (num_heads // num_kv_heads)``. Scores are multiplied by
    ``scale``, then, where ``softcap`` is set, become ``softcap * tanh(score / softcap)``. With ``window`` w
    a query at t sees keys at ``t - w < position <= t`` only. ``layer`` numbers the key-value cache planes.
    """

    q: Value
    k: Value
    v: Value
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class GatedMul:
    """``activation(gate) * up``, elementwise."""

    gate: Value
    up: Value
    activation: Activation = "silu"


@dataclass(frozen=True)
class Add:
    """``a + b``, elementwise: the residual connection (``a`` is the residual stream)."""

    a: Value
    b: Value


@dataclass(frozen=True)
class Logits:
    """``x @ weight.T`` over the vocabulary, then ``softcap * tanh(logit / softcap)`` where set.

    Always the last op; a device computes it only for the rows that were asked for.
    """

    x: Value
    weight: Param
    softcap: float | None = None


Op = Embed | Linear | RmsNorm | Rope | Attention | GatedMul | Add | Logits


@dataclass
class Graph:
    """Ops in execution order, built by a model file through the methods below.

    The methods check widths as they go and raise :class:`ValueError` for a model whose parts don't fit, so
    a finished graph is consistent; :meth:`finish` checks that it ends in logits.
    """

    vocab_size: int
    max_position_embeddings: int
    ops: list[Op] = field(default_factory=list)

    def _append(self, op: Op, width: int) -> Value:
        if self.ops and isinstance(self.ops[-1], Logits):
            raise ValueError("a graph ends with its logits; no op may follow")
        self.ops.append(op)
        return Value(len(self.ops) - 1, width)

    def embed(self, weight: Param, scale: float = 1.0) -> Value:
        """Start the graph: look up each token's row."""
        if self.ops:
            raise ValueError("embed must be the first op")
        _check(weight.shape[0] == self.vocab_size, f"{weight.name}: {weight.shape} has not one row per token")
        return self._append(Embed(weight, scale), weight.shape[1])

    def linear(self, x: Value, weight: Param, bias: Param | None = None) -> Value:
        """Project ``x`` with an ``[out, in]`` weight."""
        out, inner = weight.shape
        _check(inner == x.width, f"{weight.name}: {weight.shape} does not take inputs of width {x.width}")
        if bias is not None:
            _check(bias.shape == (out,), f"{bias.name}: {bias.shape} is not ({out},)")
        return self._append(Linear(x, weight, bias), out)

    def rms_norm(
        self, x: Value, weight: Param, eps: float, *, group: int | None = None, offset: float = 0.0
    ) -> Value:
        """Normalise each row, or each group of ``group`` elements of it."""
        size = x.width if group is None else group
        _check(weight.shape == (size,), f"{weight.name}: {weight.shape} is not ({size},)")
        _check(x.width % size == 0, f"{weight.name}: width {x.width} is not a multiple of {size}")
        return self._append(RmsNorm(x, weight, eps, size, offset), x.width)

    def rope(self, x: Value, spec: RopeSpec) -> Value:
        """Rotate each head of ``x`` by position."""
        _check(spec.head_dim % 2 == 0, f"rope needs an even head_dim, not {spec.head_dim}")
        _check(x.width % spec.head_dim == 0, f"rope: width {x.width} is not a multiple of {spec.head_dim}")
        return self._append(Rope(x, spec), x.width)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        """Attend; layers are numbered in the order of these calls."""
        _check(num_kv_heads > 0 and num_heads % num_kv_heads == 0, f"{num_heads} heads on {num_kv_heads}")
        _check(q.width == num_heads * head_dim, f"queries of width {q.width}, not {num_heads} x {head_dim}")
        for name, value in (("keys", k), ("values", v)):
            _check(value.width == num_kv_heads * head_dim, f"{name} of width {value.width}")
        _check(window is None or window > 0, f"a window of {window} keys")
        _check(softcap is None or softcap > 0, f"a softcap of {softcap}")
        layer = sum(isinstance(op, Attention) for op in self.ops)
        op = Attention(q, k, v, layer, num_heads, num_kv_heads, head_dim, scale, window, softcap)
        return self._append(op, q.width)

    def gated_mul(self, gate: Value, up: Value, activation: Activation = "silu") -> Value:
        """Gate ``up`` by ``activation(gate)``."""
        _check(gate.width == up.width, f"gate of width {gate.width}, up of {up.width}")
        return self._append(GatedMul(gate, up, activation), up.width)

    def add(self, a: Value, b: Value) -> Value:
        """Add ``b`` to the residual stream ``a``."""
        _check(a.width == b.width, f"widths {a.width} and {b.width} do not add")
        return self._append(Add(a, b), a.width)

    def logits(self, x: Value, weight: Param, softcap: float | None = None) -> Value:
        """End the graph with the output projection."""
        expected = (self.vocab_size, x.width)
        _check(weight.shape == expected, f"{weight.name}: {weight.shape} is not {expected}")
        _check(softcap is None or softcap > 0, f"a softcap of {softcap}")
        return self._append(Logits(x, weight, softcap), self.vocab_size)

    def finish(self) -> Graph:
        """Check that the graph is whole and return it."""
        _check(bool(self.ops) and isinstance(self.ops[-1], Logits), "a graph ends with its logits")
        return self

    @property
    def num_layers(self) -> int:
        """Number of attention ops, each with its own plane of the key-value cache."""
        return sum(isinstance(op, Attention) for op in self.ops)

    @property
    def params(self) -> dict[str, Param]:
        """Every tensor that the graph reads, by name."""
        found: dict[str, Param] = {}
        for op in self.ops:
            for part in (getattr(op, "weight", None), getattr(op, "bias", None)):
                if isinstance(part, Param):
                    found[part.name] = part
        return found


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
