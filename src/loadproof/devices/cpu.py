"""The CPU device: a graph's weights packed for the native plan, and the plan run a step at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from loadproof import _native
from loadproof.devices.device import (
    F32,
    I32,
    DeviceLimits,
    RowLogprobs,
    ScoreBatch,
    ScoreResult,
    StepBatch,
    StepResult,
    no_rows,
)
from loadproof.devices.lowering import (
    AttentionStep,
    LinearStep,
    LoweredGraph,
    NormStep,
    QkvStep,
    lower,
    param_columns,
)
from loadproof.devices.rope import rope_tables
from loadproof.graph import Graph, Param, RmsNorm, RopeSpec
from loadproof.weights.tensors import TensorSource, check_params

NUMERIC_FORMAT = "bf16"
LANES = 16  # columns of a packed panel


def choose_isa(isa: str | None = None) -> str:
    """The instruction-set level to run: ``isa``, else ``LOADPROOF_ISA``, else the best this machine has.

    Raises ``ValueError`` naming the levels there are for one that is not among them.
    """
    levels = _native.available_levels()
    wanted = isa or os.environ.get("LOADPROOF_ISA") or levels[0]
    if wanted not in levels:
        raise ValueError(
            f"instruction-set level {wanted!r} is not one of this machine's: {', '.join(levels)}"
        )
    return wanted


def default_num_threads() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CpuDevice:
    """A :class:`~loadproof.devices.device.Device` on the host's cores.

    Weights are bf16 in memory, products accumulate in float32, activations are rounded to bf16 where they
    enter a product, the residual stream is float32, and the key-value cache is bf16.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: TensorSource,
        limits: DeviceLimits,
        *,
        num_threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        """Pack the weights and take all memory; raises ``WeightsError`` for a misfit checkpoint."""
        lowered = lower(graph)
        check_params(tensors, graph.params.values())
        self.limits = limits
        self.vocab_size = graph.vocab_size
        self.isa = choose_isa(isa)
        self.numeric_format = NUMERIC_FORMAT
        self.num_threads = default_num_threads() if num_threads is None else num_threads
        self.fingerprint = _fingerprint(tensors, self.isa)
        plan = _native.Plan(
            self.isa,
            self.num_threads,
            lowered.logits.x.width,
            graph.vocab_size,
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            limits.max_model_len,
            limits.block_size,
            limits.num_blocks,
            logprobs_mode=_native.LogprobsMode[limits.logprobs_mode.upper()],
            keeps_hidden=limits.keeps_hidden,
        )
        _PlanBuilder(plan, tensors, limits.max_model_len, self.num_threads).build(lowered)
        self.cache_bytes = plan.cache_bytes
        self._queue: _native.StepQueue | None = _native.StepQueue(plan)

    def submit(self, batch: StepBatch) -> CpuStep:
        """See :meth:`Device.submit`; no step needs the interpreter lock to run."""
        if self._queue is None:
            raise ValueError("the device is closed")
        s = batch.sampling
        scores = batch.scores or ScoreBatch(no_rows(), no_rows(), no_rows())
        number = self._queue.submit(
            batch.token_ids,
            batch.query_starts,
            batch.seq_lens,
            batch.block_tables,
            batch.logits_rows,
            batch.carried_rows,
            batch.carried_slots,
            batch.sample_slots,
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            s.seeds,
            s.positions,
            s.history,
            s.history_starts,
            s.num_prompt,
            s.bias_ids,
            s.bias_values,
            s.bias_starts,
            s.num_logprobs,
            scores.hidden_rows,
            scores.targets,
            scores.num_top,
            batch.return_logits,
        )
        return CpuStep(self._queue, number, s.num_logprobs, batch.scores is not None)

    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step and wait for it."""
        return self.submit(batch).result()

    def close(self) -> None:
        """See :meth:`Device.close`; steps that were submitted run to their end."""
        self._queue = None


@dataclass(frozen=True)
class CpuStep:
    """A :class:`~loadproof.devices.device.SubmittedStep` of the native queue."""

    queue: _native.StepQueue
    number: int
    num_logprobs: I32
    has_scores: bool

    def result(self) -> StepResult:
        """See :meth:`SubmittedStep.result`; the interpreter lock is released meanwhile."""
        tokens, logprobs, ranks, top_ids, top_logprobs, logits = self.queue.wait(self.number)
        # Sampled rows come first, then scored ones.
        rows = _row_logprobs(self.num_logprobs, logprobs, ranks, top_ids, top_logprobs)
        if not self.has_scores:
            return StepResult(tokens, rows, logits)
        sampled, tops = len(tokens), int(np.maximum(self.num_logprobs, 0).sum())
        scores = ScoreResult(logprobs[sampled:], ranks[sampled:], top_ids[tops:], top_logprobs[tops:])
        return StepResult(tokens, rows, logits, scores)


def _row_logprobs(
    counts: I32, logprobs: F32, ranks: I32, top_ids: I32, top_logprobs: F32
) -> list[RowLogprobs | None]:
    """Split the concatenated top lists by row; rows that asked for none get ``None``."""
    rows: list[RowLogprobs | None] = []
    at = 0
    for i, count in enumerate(counts.tolist()):
        if count < 0:
            rows.append(None)
            continue
        part = slice(at, at + count)
        rows.append(RowLogprobs(float(logprobs[i]), int(ranks[i]), top_ids[part], top_logprobs[part]))
        at += count
    return rows


def _fingerprint(tensors: TensorSource, isa: str) -> str:
    """Short digest of everything an output may depend on besides the request."""
    parts = (tensors.digest(), NUMERIC_FORMAT, str(_native.KERNEL_VERSION), isa)
    return "lp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class _PlanBuilder:
    """Fills one plan; packing a tensor is a task, so that reading and packing use every core."""

    def __init__(
        self, plan: _native.Plan, tensors: TensorSource, max_model_len: int, num_threads: int
    ) -> None:
        self.plan = plan
        self.tensors = tensors
        self.max_model_len = max_model_len
        self.num_threads = num_threads
        self.tasks: list[Callable[[], None]] = []
        self.ropes: dict[RopeSpec, _native.RopeTable] = {}

    def build(self, lowered: LoweredGraph) -> None:
        table = self._matrix([lowered.embed.weight])
        output = table
        if lowered.logits.weight != lowered.embed.weight:
            output = self._matrix([lowered.logits.weight])
        self.plan.set_embedding(table, lowered.embed.scale)
        for step in lowered.steps:
            match step:
                case NormStep():
                    self._norm(step)
                case LinearStep():
                    self._linear(step)
                case QkvStep():
                    self._qkv(step)
                case AttentionStep():
                    self._attention(step)
        norm = lowered.output_norm
        softcap = lowered.logits.softcap or 0.0
        self.plan.set_output(self._vector(norm.weight), norm.eps, norm.offset, output, softcap)
        self._run_tasks()

    def _run_tasks(self) -> None:
        with ThreadPoolExecutor(self.num_threads) as pool:
            for done in [pool.submit(task) for task in self.tasks]:
                done.result()

    def _vector(self, param: Param) -> F32:
        return np.ascontiguousarray(self.tensors.read(param.name), dtype=np.float32)

    def _matrix(self, params: Iterable[Param], *, interleaved: bool = False) -> _native.Matrix:
        """Rows of ``params`` as the columns of one packed matrix, one after another or panels in turn."""
        found = list(params)
        columns = sum(_padded(p.shape[0]) for p in found) if interleaved else sum(p.shape[0] for p in found)
        matrix = _native.Matrix(columns, found[0].shape[1])
        first = 0
        for i, param in enumerate(found):
            place = (0, len(found), i) if interleaved else (first, 1, 0)
            self.tasks.append(lambda param=param, place=place: self._pack(matrix, param, place))  # type: ignore[misc]
            first += param.shape[0]
        return matrix

    def _pack(self, matrix: _native.Matrix, param: Param, place: tuple[int, int, int]) -> None:
        rows = np.ascontiguousarray(self.tensors.read_bf16(param.name))
        matrix.pack(rows.view(np.uint16), *place)

    def _norm(self, step: NormStep) -> None:
        norm = step.norm
        self.plan.add_norm(
            _native.Buffer[step.source],
            _native.Buffer[step.target],
            _native.NormOutput[step.output],
            self._vector(norm.weight),
            norm.eps,
            norm.offset,
        )

    def _linear(self, step: LinearStep) -> None:
        gated = step.epilogue == "GATED"
        self.plan.add_linear(
            _native.Buffer[step.source],
            _native.Buffer[step.target],
            self._matrix([layer.weight for layer in step.layers], interleaved=gated),
            self._bias(step),
            param_columns(step.layers),
            _native.Epilogue[step.epilogue],
            _native.Gate[step.activation.upper()],
        )

    def _bias(self, step: LinearStep) -> F32:
        """Biases in the order of the packed columns, zero where a layer has none; empty where none has."""
        if all(layer.bias is None for layer in step.layers):
            return np.zeros(0, dtype=np.float32)
        parts = []
        for layer in step.layers:
            part = np.zeros(layer.weight.shape[0], dtype=np.float32)
            if layer.bias is not None:
                part = self._vector(layer.bias)
            parts.append(part)
        if step.epilogue == "GATED":
            panels = [np.pad(p, (0, _padded(len(p)) - len(p))).reshape(-1, LANES) for p in parts]
            return np.ascontiguousarray(np.stack(panels, axis=1).reshape(-1))
        joined = np.concatenate(parts)
        return np.pad(joined, (0, _padded(len(joined)) - len(joined)))

    def _qkv(self, step: QkvStep) -> None:
        a = step.attention
        norm = step.q_norm or step.k_norm
        self.plan.add_qkv(
            a.layer,
            a.num_heads,
            a.num_kv_heads,
            a.head_dim,
            self._head_norm(step.q_norm),
            self._head_norm(step.k_norm),
            norm.eps if norm else 0.0,
            norm.offset if norm else 0.0,
            self._rope(step.rope),
        )

    def _head_norm(self, norm: RmsNorm | None) -> F32:
        return np.zeros(0, dtype=np.float32) if norm is None else self._vector(norm.weight)

    def _rope(self, spec: RopeSpec | None) -> _native.RopeTable | None:
        if spec is None:
            return None
        if spec not in self.ropes:
            self.ropes[spec] = _native.RopeTable(*rope_tables(spec, self.max_model_len))
        return self.ropes[spec]

    def _attention(self, step: AttentionStep) -> None:
        a = step.attention
        self.plan.add_attention(
            a.layer, a.num_heads, a.num_kv_heads, a.head_dim, a.scale, a.softcap or 0.0, a.window or 0
        )


def _padded(columns: int) -> int:
    return -(-columns // LANES) * LANES
