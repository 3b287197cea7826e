"""From a :class:`Graph` to the steps of the native plan: which ops are done together.

The native plan knows four steps. Linear layers that share an input are one product (queries, keys and
values; gates and ups), and what follows a product elementwise is done while its result is still in cache:
the gate, the residual addition, head norms with rotation and the store into the key-value cache. The walk
is from each sink (attention, gated product, residual addition, logits) back to the linear layers that feed
it; a graph with another shape is refused, never run wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadproof.graph import (
    Activation,
    Add,
    Attention,
    Embed,
    GatedMul,
    Graph,
    Linear,
    Logits,
    Op,
    Param,
    RmsNorm,
    Rope,
    RopeSpec,
    Value,
)

BufferName = Literal["RESIDUAL", "NORMED", "QKV", "ATTENDED", "GATED", "PROJECTED"]


class UnsupportedGraphError(ValueError):
    """A graph whose ops do not follow each other in a way that the native plan runs."""


@dataclass(frozen=True)
class NormStep:
    """A norm of rows of ``source``: to bf16 (``NORMED``), in place, or added to the residual stream."""

    source: BufferName
    target: BufferName
    output: Literal["BF16", "FLOAT", "ADD"]
    norm: RmsNorm


@dataclass(frozen=True)
class LinearStep:
    """One product with the weights of ``layers`` side by side; ``GATED`` interleaves a gate with its up."""

    source: BufferName
    target: BufferName
    epilogue: Literal["STORE", "ADD", "GATED"]
    layers: tuple[Linear, ...]
    activation: Activation = "silu"


@dataclass(frozen=True)
class QkvStep:
    """Head norms and rotation of queries and keys; keys and values into the cache."""

    attention: Attention
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    rope: RopeSpec | None


@dataclass(frozen=True)
class AttentionStep:
    """Attention over the cache into ``ATTENDED``."""

    attention: Attention


Step = NormStep | LinearStep | QkvStep | AttentionStep


@dataclass(frozen=True)
class LoweredGraph:
    """What the native plan runs: an embedding, steps, and the output norm and projection."""

    embed: Embed
    steps: tuple[Step, ...]
    output_norm: RmsNorm
    logits: Logits


def lower(graph: Graph) -> LoweredGraph:
    """Lower ``graph``; raises :class:`UnsupportedGraphError` where its shape is not the plan's."""
    return _Lowering(graph).run()


class _Lowering:
    """One walk over a graph's ops, in order, emitting the steps of each sink as it is met."""

    def __init__(self, graph: Graph) -> None:
        self.ops = graph.ops
        self.steps: list[Step] = []
        self.residual: int | None = None  # index of the op whose value the residual stream holds
        self.normed: int | None = None  # index of the norm whose value NORMED holds
        self.blocks: dict[
            BufferName, int
        ] = {}  # of ATTENDED and GATED: index of the op whose value they hold

    def run(self) -> LoweredGraph:
        _require(bool(self.ops), "it is empty")
        embed, last = self.ops[0], self.ops[-1]
        _require(isinstance(embed, Embed), "a graph starts with an embedding")
        _require(isinstance(last, Logits), "a graph ends with its logits")
        assert isinstance(embed, Embed)
        assert isinstance(last, Logits)
        self.residual = 0
        for index, op in enumerate(self.ops):
            match op:
                case Attention():
                    self._attention(op)
                    self.blocks["ATTENDED"] = index
                case GatedMul():
                    self._gated(op)
                    self.blocks["GATED"] = index
                case Add():
                    self._add(index, op)
                case _:
                    pass  # part of a sink
        norm = self._op(last.x)
        _require(isinstance(norm, RmsNorm), "logits follow a norm")
        assert isinstance(norm, RmsNorm)
        self._check_residual(norm.x)
        return LoweredGraph(embed, tuple(self.steps), norm, last)

    def _op(self, value: Value) -> Op:
        return self.ops[value.index]

    def _check_residual(self, value: Value) -> None:
        _require(value.index == self.residual, "a norm or addition does not read the residual stream")

    def _linear(self, value: Value) -> Linear:
        op = self._op(value)
        _require(isinstance(op, Linear), f"{type(op).__name__} where a linear layer is expected")
        assert isinstance(op, Linear)
        return op

    def _normed_input(self, layers: tuple[Linear, ...]) -> None:
        """Emit the norm that feeds ``layers``, which must share it."""
        source = layers[0].x
        _require(all(layer.x == source for layer in layers), "linear layers done together have one input")
        norm = self._op(source)
        _require(isinstance(norm, RmsNorm), "a block starts with a norm of the residual stream")
        assert isinstance(norm, RmsNorm)
        if self.normed != source.index:
            self._check_residual(norm.x)
            self.steps.append(NormStep("RESIDUAL", "NORMED", "BF16", norm))
            self.normed = source.index

    def _head(self, value: Value) -> tuple[Linear, RmsNorm | None, RopeSpec | None]:
        """Unwrap ``rope(rms_norm(linear))``, each wrapper optional."""
        op, rope, norm = self._op(value), None, None
        if isinstance(op, Rope):
            rope, op = op.spec, self._op(op.x)
        if isinstance(op, RmsNorm):
            norm, op = op, self._op(op.x)
        _require(isinstance(op, Linear), "queries and keys are linear, then normed, then rotated")
        assert isinstance(op, Linear)
        return op, norm, rope

    def _attention(self, op: Attention) -> None:
        q, q_norm, rope = self._head(op.q)
        k, k_norm, k_rope = self._head(op.k)
        _require(rope == k_rope, "queries and keys rotate alike")
        for norm in (q_norm, k_norm):
            _require(norm is None or norm.group == op.head_dim, "queries and keys are normed by head")
        if q_norm and k_norm:
            alike = (q_norm.eps, q_norm.offset) == (k_norm.eps, k_norm.offset)
            _require(alike, "query and key norms agree in eps and offset")
        layers = (q, k, self._linear(op.v))
        self._normed_input(layers)
        self.steps.append(LinearStep("NORMED", "QKV", "STORE", layers))
        self.steps.append(QkvStep(op, q_norm, k_norm, rope))
        self.steps.append(AttentionStep(op))

    def _gated(self, op: GatedMul) -> None:
        layers = (self._linear(op.gate), self._linear(op.up))
        self._normed_input(layers)
        self.steps.append(LinearStep("NORMED", "GATED", "GATED", layers, op.activation))

    def _add(self, index: int, op: Add) -> None:
        """A residual addition of a projection, or of a norm of one."""
        self._check_residual(op.a)
        branch = self._op(op.b)
        norm = branch if isinstance(branch, RmsNorm) else None
        layer = self._linear(norm.x if norm else op.b)
        source: BufferName = "ATTENDED" if isinstance(self._op(layer.x), Attention) else "GATED"
        _require(self.blocks.get(source) == layer.x.index, "a projection does not read the latest block")
        if norm is None:
            self.steps.append(LinearStep(source, "RESIDUAL", "ADD", (layer,)))
        else:
            _require(norm.group == op.b.width, "a norm before an addition is over the whole row")
            self.steps.append(LinearStep(source, "PROJECTED", "STORE", (layer,)))
            self.steps.append(NormStep("PROJECTED", "RESIDUAL", "ADD", norm))
        self.residual, self.normed = index, None


def param_columns(layers: tuple[Linear, ...]) -> int:
    """Output columns of linear layers side by side."""
    return sum(layer.weight.shape[0] for layer in layers)


def biases(layers: tuple[Linear, ...]) -> tuple[Param | None, ...]:
    """The bias of each layer, where it has one."""
    return tuple(layer.bias for layer in layers)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UnsupportedGraphError(f"the native plan cannot run this graph: {message}")
