"""The float32 oracle: a Graph run op by op in NumPy over one whole sequence.

It is written to be read beside ``graph.py``: one short function an op, each the formula in its docstring.
Kernels and models are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from loadproof.devices.rope import rope_tables
from loadproof.graph import (
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
from loadproof.weights.tensors import TensorSource, check_params

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_CHUNK = 128  # query rows whose scores exist at a time


class ReferenceDevice:
    """One model's graph with its weights in float32.

    Raises :class:`~loadproof.weights.tensors.WeightsError`, before reading any tensor, where ``tensors``
    lacks one that the graph reads or has it in another shape.
    """

    def __init__(self, graph: Graph, tensors: TensorSource) -> None:
        check_params(tensors, graph.params.values())
        self.graph = graph
        self._weights = {name: np.asarray(tensors.read(name), np.float32) for name in graph.params}
        self._last_use = _last_uses(graph)

    def forward(self, token_ids: Sequence[int] | I32, rows: slice = slice(None)) -> F32:
        """Logits ``[T, vocab_size]`` after each of the T tokens of one sequence, or after ``rows`` of them.

        Raises :class:`ValueError` for no tokens, more than the model has positions for, or an id out of
        range.
        """
        tokens = self._checked(token_ids)
        run = _Run(tokens, rows, self._weights)
        results: dict[int, F32] = {}
        for index, op in enumerate(self.graph.ops):
            results[index] = run.apply(op, results)
            for dead in self._last_use[index]:
                del results[dead]
        return results[len(self.graph.ops) - 1]

    def greedy(self, token_ids: Sequence[int] | I32, n: int) -> list[int]:
        """The ``n`` most likely tokens one after another, ties to the lowest id; recomputes all each time."""
        tokens = [int(token) for token in token_ids]
        for _ in range(n):
            tokens.append(int(self.forward(tokens, slice(-1, None)).argmax()))
        return tokens[len(token_ids) :]

    def _checked(self, token_ids: Sequence[int] | I32) -> npt.NDArray[np.int64]:
        tokens = np.asarray(token_ids, dtype=np.int64)
        if tokens.ndim != 1 or not 0 < tokens.size <= self.graph.max_position_embeddings:
            raise ValueError(
                f"token ids of shape {tokens.shape}, not 1 to {self.graph.max_position_embeddings} in a row"
            )
        if tokens.min() < 0 or tokens.max() >= self.graph.vocab_size:
            raise ValueError(f"token ids must lie within 0 to {self.graph.vocab_size - 1}")
        return tokens


class _Run:
    """The ops over one sequence: its tokens, the weights, and the rotary tables met so far."""

    def __init__(self, tokens: npt.NDArray[np.int64], rows: slice, weights: dict[str, F32]) -> None:
        self.tokens = tokens
        self.rows = rows
        self.weights = weights
        self.tables: dict[RopeSpec, tuple[F32, F32]] = {}

    def apply(self, op: Op, results: dict[int, F32]) -> F32:
        """The result of ``op``, whose inputs are in ``results`` by op index."""

        def value(v: Value) -> F32:
            return results[v.index]

        def param(p: Param) -> F32:
            return self.weights[p.name]

        match op:
            case Embed():
                return param(op.weight)[self.tokens] * np.float32(op.scale)
            case Linear():
                return linear(value(op.x), param(op.weight), param(op.bias) if op.bias else None)
            case RmsNorm():
                return rms_norm(value(op.x), param(op.weight) + np.float32(op.offset), op.eps)
            case Rope():
                return rope(value(op.x), *self._table(op.spec))
            case Attention():
                return attention(value(op.q), value(op.k), value(op.v), op)
            case GatedMul():
                return ACTIVATIONS[op.activation](value(op.gate)) * value(op.up)
            case Add():
                return value(op.a) + value(op.b)
            case Logits():
                return soft_cap(linear(value(op.x)[self.rows], param(op.weight)), op.softcap)

    def _table(self, spec: RopeSpec) -> tuple[F32, F32]:
        if spec not in self.tables:
            self.tables[spec] = rope_tables(spec, len(self.tokens))
        return self.tables[spec]


def linear(x: F32, weight: F32, bias: F32 | None = None) -> F32:
    """``x @ weight.T + bias``: ``[T, in]`` by ``[out, in]`` is ``[T, out]``."""
    y: F32 = x @ weight.T
    if bias is not None:
        y += bias
    return y


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """``x / sqrt(mean(x**2) + eps) * weight`` over groups as long as ``weight`` (arXiv 1910.07467)."""
    groups = x.reshape(len(x), -1, len(weight))
    mean_square = np.square(groups).mean(axis=-1, keepdims=True)
    normed: F32 = groups / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed.reshape(x.shape)


def rope(x: F32, cos: F32, sin: F32) -> F32:
    """Each head of ``[T, heads * head_dim]`` rotated, element ``i`` with ``i + head_dim / 2``.

    ``cos`` and ``sin`` are ``[T, head_dim / 2]``.
    """
    halves = x.reshape(len(x), -1, 2, cos.shape[1])
    a, b = halves[:, :, 0], halves[:, :, 1]
    c, s = cos[:, None], sin[:, None]
    rotated: F32 = np.stack([a * c - b * s, b * c + a * s], axis=2)
    return rotated.reshape(x.shape)


def attention(q: F32, k: F32, v: F32, op: Attention) -> F32:
    """Causal grouped-query attention, ``softmax(scale * q @ k.T) @ v`` for each head over the keys it sees.

    ``q`` and the result are ``[T, num_heads * head_dim]``; ``k`` and ``v`` ``[T, num_kv_heads * head_dim]``.
    """
    num_rows, size = len(q), op.head_dim
    # [kv, group, T, size], [kv, 1, size, T] and [kv, 1, T, size]
    queries = q.reshape(num_rows, op.num_kv_heads, -1, size).transpose(1, 2, 0, 3)
    keys = np.ascontiguousarray(k.reshape(num_rows, op.num_kv_heads, 1, size).transpose(1, 2, 3, 0))
    values = v.reshape(num_rows, op.num_kv_heads, 1, size).transpose(1, 2, 0, 3)
    out = np.empty((num_rows, op.num_heads, size), np.float32)
    for start in range(0, num_rows, _CHUNK):
        stop = min(start + _CHUNK, num_rows)
        first = 0 if op.window is None else max(0, start - op.window + 1)
        scores = queries[:, :, start:stop] @ keys[..., first:stop] * np.float32(op.scale)
        scores = soft_cap(scores, op.softcap)
        hidden = ~visible(np.arange(start, stop), np.arange(first, stop), op.window)
        part = softmax(np.where(hidden, np.float32(-np.inf), scores)) @ values[:, :, first:stop]
        out[start:stop] = part.reshape(op.num_heads, stop - start, size).transpose(1, 0, 2)
    return out.reshape(q.shape)


def visible(
    queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], window: int | None
) -> npt.NDArray[np.bool_]:
    """Which key positions each query position sees: ``query - window < key <= query``."""
    distance = queries[:, None] - keys[None, :]
    seen: npt.NDArray[np.bool_] = distance >= 0
    return seen if window is None else seen & (distance < window)


def softmax(scores: F32) -> F32:
    """``exp(x) / sum(exp(x))`` over the last axis, shifted by the largest so that none overflows."""
    exps: F32 = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exps /= exps.sum(axis=-1, keepdims=True)
    return exps


def soft_cap(x: F32, cap: float | None) -> F32:
    """``cap * tanh(x / cap)``; ``x`` itself without a cap."""
    return x if cap is None else np.tanh(x / np.float32(cap)) * np.float32(cap)


def silu(x: F32) -> F32:
    """``x / (1 + exp(-x))``."""
    with np.errstate(over="ignore"):  # exp(-x) is infinite for large negative x, and the quotient 0
        result: F32 = x / (1 + np.exp(-x))
    return result


def gelu(x: F32) -> F32:
    """``x * (1 + erf(x / sqrt(2))) / 2`` (arXiv 1606.08415)."""
    erf = np.frompyfunc(math.erf, 1, 1)(x * np.float32(math.sqrt(0.5))).astype(np.float32)
    result: F32 = np.float32(0.5) * x * (1 + erf)
    return result


def gelu_tanh(x: F32) -> F32:
    """``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2`` (arXiv 1606.08415)."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    result: F32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


def _last_uses(graph: Graph) -> list[list[int]]:
    """For each op the values that no later op reads, itself included, so that they can be dropped."""
    last = dict.fromkeys(range(len(graph.ops)), len(graph.ops))
    for index, op in enumerate(graph.ops):
        for part in vars(op).values():
            if isinstance(part, Value):
                last[part.index] = index
    return [[value for value, use in last.items() if use == index] for index in range(len(graph.ops))]
