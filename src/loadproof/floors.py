"""Floors: the least time a workload can take on a machine, from counted operations and bytes.

Counted are the products and the memory that any executor of the graph needs, in bf16 (two bytes an
element), a multiply and an add as two operations:

- layers: ``2 * out * in`` operations a token for each linear layer;
- output projection: ``2 * vocab_size * hidden_size`` for each token that is sampled;
- attention: ``4 * num_heads * head_dim`` for each query and each key that it sees (scores, then values);
- weights: every tensor but the embedding table read once a step, the output projection only in steps that
  sample; the table's single rows are left out;
- keys and values: ``2 * num_kv_heads * head_dim`` elements a position and layer, written once, and read in
  each later step of the sequence for which its first query still sees them.

A step takes at least ``max(operations / operation rate, bytes / byte rate)``, and a workload the sum over its
steps. Norms, rotations, activations, softmax and sampling are not counted, so a floor is never too high. It
belongs to the token budget it is counted with: another budget mixes prompts and decodes in other steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from loadproof.graph import Attention, Embed, Graph, Linear, Logits

if TYPE_CHECKING:
    from loadproof.bench import Workload

_ELEMENT_BYTES = 2  # bf16


class Chunk(NamedTuple):
    """Positions ``first..first + num_tokens - 1`` of one sequence, computed in one step.

    ``samples`` says that the next token is wanted, which takes one row of the output projection.
    """

    first: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes to and from memory."""

    operations: int
    num_bytes: int

    def __add__(self, other: Self) -> Work:
        return Work(self.operations + other.operations, self.num_bytes + other.num_bytes)


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, as measured: bytes read, and operations in two ways.

    ``product_rate`` is the linear kernel's on operands in cache, ``instruction_rate`` that of its product
    instruction alone.
    """

    read_bandwidth: float
    product_rate: float
    instruction_rate: float

    @property
    def operation_rate(self) -> float:
        """Operations a second that nothing exceeds: the better of the two measurements."""
        return max(self.product_rate, self.instruction_rate)

    @property
    def at_product_rate(self) -> Rates:
        """The same machine with products no faster than the linear kernel's."""
        return Rates(self.read_bandwidth, self.product_rate, self.product_rate)

    def best(self, other: Self) -> Rates:
        """The better of two measurements, each by each: noise only ever slows."""
        return Rates(
            max(self.read_bandwidth, other.read_bandwidth),
            max(self.product_rate, other.product_rate),
            max(self.instruction_rate, other.instruction_rate),
        )

    def seconds(self, work: Work) -> float:
        """The least time of work that is done at once."""
        return max(work.operations / self.operation_rate, work.num_bytes / self.read_bandwidth)


@dataclass(frozen=True)
class AttentionCost:
    """One shape of attention layer; ``window`` is how many keys a query sees at most, None for all."""

    query_width: int  # num_heads * head_dim
    key_width: int  # num_kv_heads * head_dim
    window: int | None

    def of(self, chunk: Chunk) -> Work:
        """Work of one such layer for one chunk, its keys and values written and read included."""
        read = chunk.first if self.window is None else min(chunk.first, self.window - 1)
        position_bytes = 2 * self.key_width * _ELEMENT_BYTES
        return Work(4 * self.query_width * self._keys_seen(chunk), position_bytes * (read + chunk.num_tokens))

    def _keys_seen(self, chunk: Chunk) -> int:
        """Keys seen by each query of the chunk, summed: by the one at t its t + 1, or the window if fewer."""
        end = chunk.first + chunk.num_tokens
        if self.window is None:
            return _sum_to(end) - _sum_to(chunk.first)
        growing = min(end, max(chunk.first, self.window))  # queries before this one see all keys
        return _sum_to(growing) - _sum_to(chunk.first) + (end - growing) * self.window


@dataclass(frozen=True)
class GraphCost:
    """What the steps of one graph cost, counted by :func:`count`."""

    operations_per_token: int
    operations_per_sample: int
    layer_bytes: int
    output_bytes: int
    attention: tuple[tuple[AttentionCost, int], ...]  # each shape, and how many layers have it

    def step(self, chunks: Iterable[Chunk]) -> Work:
        """Work of one step over chunks of different sequences; none at all for no chunks."""
        chunks = list(chunks)
        if not chunks:
            return Work(0, 0)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        num_samples = sum(chunk.samples for chunk in chunks)
        operations = num_tokens * self.operations_per_token + num_samples * self.operations_per_sample
        total = Work(operations, self.layer_bytes + (self.output_bytes if num_samples else 0))
        for cost, num_layers in self.attention:
            for work in (cost.of(chunk) for chunk in chunks):
                total += Work(num_layers * work.operations, num_layers * work.num_bytes)
        return total


@dataclass(frozen=True)
class Floor:
    """The least seconds of a workload, and how they come about.

    ``operation_seconds`` and ``byte_seconds`` are what the operations alone and the bytes alone would take:
    ``seconds`` is at least the larger of them, and at most their sum.
    """

    seconds: float
    operation_seconds: float
    byte_seconds: float
    num_steps: int


def count(graph: Graph) -> GraphCost:
    """Count a graph; a tied table is counted as the output projection, not where tokens are looked up."""
    embed, logits = graph.ops[0], graph.ops[-1]
    assert isinstance(embed, Embed)
    assert isinstance(logits, Logits)
    sizes = {name: math.prod(param.shape) for name, param in graph.params.items()}
    layers = sum(sizes.values()) - sum(sizes[name] for name in {embed.weight.name, logits.weight.name})
    linear = sum(math.prod(op.weight.shape) for op in graph.ops if isinstance(op, Linear))
    shapes = Counter(
        AttentionCost(op.num_heads * op.head_dim, op.num_kv_heads * op.head_dim, op.window)
        for op in graph.ops
        if isinstance(op, Attention)
    )
    output = sizes[logits.weight.name]
    return GraphCost(
        operations_per_token=2 * linear,
        operations_per_sample=2 * output,
        layer_bytes=layers * _ELEMENT_BYTES,
        output_bytes=output * _ELEMENT_BYTES,
        attention=tuple(shapes.items()),
    )


def steps(
    workload: Workload, *, max_num_batched_tokens: int = 2048, max_num_seqs: int = 64
) -> Iterator[list[Chunk]]:
    """The steps of a workload under a token budget: first come first served, prompts in chunks.

    Each step gives running sequences the tokens they lack, in the order they came, then starts waiting ones.
    The last token of a sequence is sampled but never computed. Raises ``ValueError`` for sizes below one.
    """
    sizes = (workload.num_prompts, workload.input_len, workload.output_len)
    if min(*sizes, max_num_batched_tokens, max_num_seqs) < 1:
        raise ValueError(
            f"sizes and limits must be positive: {sizes}, {max_num_batched_tokens}, {max_num_seqs}"
        )
    last = workload.input_len + workload.output_len - 1  # positions that each sequence computes
    waiting = workload.num_prompts
    running: list[int] = []  # positions computed so far, by sequence
    while waiting or running:
        admitted = min(waiting, max_num_seqs - len(running))
        budget = max_num_batched_tokens
        chunks: list[Chunk] = []
        for first in [*running, *[0] * admitted]:
            known = max(workload.input_len, first + 1)
            taken = min(known - first, budget)
            if taken == 0:
                break
            budget -= taken
            chunks.append(Chunk(first, taken, first + taken == known))
        waiting -= max(0, len(chunks) - len(running))
        moved = [chunk.first + chunk.num_tokens for chunk in chunks]
        running = [position for position in moved if position < last] + running[len(chunks) :]
        yield chunks


def floor(
    cost: GraphCost,
    workload: Workload,
    rates: Rates,
    *,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 64,
) -> Floor:
    """The least time that a workload takes at these rates, the sum of its steps' (see the module)."""
    works = [
        cost.step(chunks)
        for chunks in steps(
            workload, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
        )
    ]
    total = sum(works, Work(0, 0))
    return Floor(
        seconds=sum(rates.seconds(work) for work in works),
        operation_seconds=total.operations / rates.operation_rate,
        byte_seconds=total.num_bytes / rates.read_bandwidth,
        num_steps=len(works),
    )


def measure_rates(cost: GraphCost, *, num_threads: int | None = None, isa: str | None = None) -> Rates:
    """Measure this machine in about a second: memory over as many bytes as a decoding step's weights.

    Threads and level default to a device's own choice; raises ``ValueError`` for ones that can't be had.
    """
    from loadproof import _native
    from loadproof.devices.cpu import choose_isa, default_num_threads

    level = choose_isa(isa)
    threads = default_num_threads() if num_threads is None else num_threads
    num_bytes = min(max(cost.layer_bytes + cost.output_bytes, 1 << 20), 1 << 34)
    return Rates(
        read_bandwidth=_native.read_bandwidth(threads, num_bytes),
        product_rate=_native.product_rate(level, threads),
        instruction_rate=_native.instruction_rate(level, threads),
    )


def _sum_to(n: int) -> int:
    return n * (n + 1) // 2
