"""A device whose next token is a hash of the whole prefix, and a tokenizer of bytes to go with it.

The prefix is rebuilt only from what steps wrote into the blocks of a sequence's table, so an engine that
mixes up a block, a position or a row answers with other tokens. A position's hidden state is the prefix that
its row had when a step computed it, so scores tell such a mix-up too. What no engine may do is asserted.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from loadproof.config import EngineConfig
from loadproof.devices.device import (
    F32,
    I32,
    DeviceLimits,
    RowLogprobs,
    SamplingBatch,
    ScoreBatch,
    ScoreResult,
    StepBatch,
    StepResult,
)
from loadproof.engine.loader import LoadedModel
from loadproof.tokenizer.chat import ChatTemplates
from loadproof.tokenizer.tokenizer import SpecialTokens, Tokenizer

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
VOCAB_SIZE = 260
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token ids 0..255 are bytes in the order of the byte-level alphabet; then the special tokens."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    special = SpecialTokens(BOS, EOS, frozenset({EOS, IM_END}), {"bos_token": "<s>", "eos_token": "</s>"})
    return Tokenizer(backend, special, ChatTemplates({"default": CHAT_TEMPLATE}))


def small_limits(
    *,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    num_blocks: int = 64,
    keeps_hidden: int = True,  # a flag; tests hand sizes on by name
) -> DeviceLimits:
    return DeviceLimits(
        max_num_batched_tokens, max_num_seqs, max_model_len, 16, num_blocks, keeps_hidden=bool(keeps_hidden)
    )


class FakeDevice:
    """See the module. ``num_rows`` counts the token rows of all steps, ``largest_step`` those of one.

    ``num_scored`` counts scored positions, ``num_tops`` the best tokens that were wanted with them.

    A submitted step runs as late as may be: when its result, or a later one's, is asked for.
    """

    def __init__(self, limits: DeviceLimits | None = None, vocab_size: int = VOCAB_SIZE) -> None:
        self.limits = limits or small_limits()
        self.vocab_size = vocab_size
        self.fingerprint = "fake"
        self.closed = False
        self.num_rows = 0
        self.num_steps = 0
        self.largest_step = 0
        self.num_carried = 0
        self.num_scored = 0
        self.most_scored = 0  # by one step
        self.num_tops = 0
        self.num_rowless = 0  # steps that only score
        self.fail_at_step: int | None = None
        self._waiting: deque[FakeStep] = deque()
        self._produced: frozenset[int] = frozenset()  # slots that the newest submitted step samples into
        self._last_tokens: dict[int, int] = {}
        self._tokens = np.full((self.limits.num_blocks, self.limits.block_size), -1, np.int64)
        self._positions = np.full_like(self._tokens, -1)
        self._hidden: dict[int, list[int]] = {}  # prefixes by flat index of the cache, or by row of the step

    def submit(self, batch: StepBatch) -> FakeStep:
        assert not self.closed
        self._check(batch)
        self._produced = frozenset(batch.sample_slots.tolist())
        step = FakeStep(self, batch)
        self._waiting.append(step)
        return step

    def run_until(self, step: FakeStep) -> None:
        while not step.done:
            first = self._waiting.popleft()
            first.done = True
            try:
                first.found = self._run(first.batch)
            except RuntimeError as error:
                first.error = error

    def _run(self, submitted: StepBatch) -> StepResult:
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            self._last_tokens = {}
            raise RuntimeError("the device failed")
        batch = self._carry(submitted)
        self._write(batch)
        self._keep_hidden(batch)
        rows = [self._logits(batch, int(row)) for row in batch.logits_rows]
        sampled = [sample(logits, batch.sampling, row) for row, logits in enumerate(rows)]
        tokens = np.array([token for token, _ in sampled], np.int32)
        self._last_tokens = dict(zip(batch.sample_slots.tolist(), tokens.tolist(), strict=False))
        return StepResult(
            tokens,
            [logprobs for _, logprobs in sampled],
            np.array(rows, np.float32).reshape(-1, self.vocab_size) if batch.return_logits else None,
            None if batch.scores is None else self._score(batch.scores),
        )

    def _carry(self, batch: StepBatch) -> StepBatch:
        """The batch with the tokens that it takes from the step before."""
        token_ids, history = batch.token_ids.copy(), batch.sampling.history.copy()
        for row, slot in zip(batch.carried_rows.tolist(), batch.carried_slots.tolist(), strict=True):
            if slot not in self._last_tokens:
                raise RuntimeError("the step before failed")
            token_ids[row] = self._last_tokens[slot]
            self.num_carried += 1
        starts = batch.sampling.history_starts
        for index, row in enumerate(batch.logits_rows.tolist()):
            if starts[index] < starts[index + 1]:
                history[starts[index + 1] - 1] = token_ids[row]
        return replace(batch, token_ids=token_ids, sampling=replace(batch.sampling, history=history))

    def close(self) -> None:
        self.closed = True

    def _check(self, batch: StepBatch) -> None:
        num_rows, num_seqs = len(batch.token_ids), len(batch.seq_lens)
        self.num_rows += num_rows
        self.largest_step = max(self.largest_step, num_rows)
        self.num_rowless += not num_rows
        for array in (batch.token_ids, batch.query_starts, batch.seq_lens, batch.logits_rows):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        assert batch.block_tables.dtype == np.int32
        assert batch.block_tables.flags.c_contiguous
        assert batch.block_tables.shape[0] == num_seqs
        least = 0 if batch.scores is not None and len(batch.scores.targets) else 1
        assert least <= num_rows <= self.limits.max_num_batched_tokens
        assert least <= num_seqs <= self.limits.max_num_seqs
        assert batch.seq_lens.max(initial=0) <= self.limits.max_model_len
        assert batch.query_starts[0] == 0
        assert batch.query_starts[-1] == num_rows
        assert (np.diff(batch.query_starts) > 0).all()
        assert (np.diff(batch.logits_rows) > 0).all()
        assert ((batch.token_ids >= 0) & (batch.token_ids < self.vocab_size)).all()
        assert ((batch.block_tables >= 0) & (batch.block_tables < self.limits.num_blocks)).all()
        check_sampling(batch.sampling, len(batch.logits_rows))
        if batch.scores is not None:
            self._check_scores(batch.scores, num_rows)
        for array in (batch.sample_slots, batch.carried_rows, batch.carried_slots):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        assert len(batch.sample_slots) in (0, len(batch.logits_rows))
        assert len(set(batch.sample_slots.tolist())) == len(batch.sample_slots)
        assert (np.diff(batch.carried_rows) > 0).all()
        if not set(batch.carried_slots.tolist()) <= self._produced:
            raise ValueError("a row carries over a token that the step before it did not sample")

    def _check_scores(self, scores: ScoreBatch, num_rows: int) -> None:
        count, limits = len(scores.targets), self.limits
        for array in (scores.hidden_rows, scores.targets, scores.num_top):
            assert array.dtype == np.int32
            assert array.shape == (count,)
            assert array.flags.c_contiguous
        assert count <= limits.max_num_batched_tokens
        places = limits.num_blocks * limits.block_size if limits.keeps_hidden else num_rows
        assert ((scores.hidden_rows >= 0) & (scores.hidden_rows < places)).all()
        assert ((scores.targets >= 0) & (scores.targets < self.vocab_size)).all()
        assert ((scores.num_top >= 0) & (scores.num_top <= self.vocab_size)).all()
        self.num_scored += count
        self.most_scored = max(self.most_scored, count)
        self.num_tops += int(scores.num_top.sum())

    def _write(self, batch: StepBatch) -> None:
        written: set[int] = set()
        for index, length in enumerate(batch.seq_lens):
            first, last = batch.query_starts[index : index + 2]
            positions = np.arange(length - (last - first), length)
            table = batch.block_tables[index]
            blocks = table[positions // self.limits.block_size]
            assert not written & set(blocks.tolist()), "two sequences write one block"
            written |= set(blocks.tolist())
            self._tokens[blocks, positions % self.limits.block_size] = batch.token_ids[first:last]
            self._positions[blocks, positions % self.limits.block_size] = positions

    def _keep_hidden(self, batch: StepBatch) -> None:
        if not self.limits.keeps_hidden:
            self._hidden = {}
            if batch.scores is None:
                return
        for row in range(len(batch.token_ids)):
            block, offset, prefix = self._place(batch, row)
            at = block * self.limits.block_size + offset if self.limits.keeps_hidden else row
            self._hidden[at] = prefix

    def _score(self, scores: ScoreBatch) -> ScoreResult:
        rows = []
        for at, target, count in zip(*_columns(scores), strict=True):
            rows.append(_logprobs(logits_of(self._hidden[at], self.vocab_size), target, count))
        return ScoreResult(
            np.array([row.token_logprob for row in rows], np.float32),
            np.array([row.token_rank for row in rows], np.int32),
            np.concatenate([np.zeros(0, np.int32), *(row.top_ids for row in rows)]),
            np.concatenate([np.zeros(0, np.float32), *(row.top_logprobs for row in rows)]),
        )

    def _logits(self, batch: StepBatch, row: int) -> F32:
        return logits_of(self._place(batch, row)[2], self.vocab_size)

    def _place(self, batch: StepBatch, row: int) -> tuple[int, int, list[int]]:
        """Block and offset of a row's position, and the prefix that ends there."""
        index = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
        position = int(batch.seq_lens[index] - (batch.query_starts[index + 1] - row))
        positions = np.arange(position + 1)
        blocks = batch.block_tables[index][positions // self.limits.block_size]
        offsets = positions % self.limits.block_size
        assert (self._positions[blocks, offsets] == positions).all(), "the cache holds other positions"
        return int(blocks[-1]), int(offsets[-1]), self._tokens[blocks, offsets].tolist()


@dataclass(eq=False)
class FakeStep:
    """A step that was submitted to a fake device."""

    device: FakeDevice
    batch: StepBatch
    done: bool = False
    found: StepResult | None = None
    error: RuntimeError | None = None

    def result(self) -> StepResult:
        self.device.run_until(self)
        if self.error is not None:
            raise self.error
        assert self.found is not None
        return self.found


def logits_of(prefix: list[int], vocab_size: int = VOCAB_SIZE) -> F32:
    """The fake model: logits that only the whole prefix determines."""
    digest = hashlib.blake2b(np.array(prefix, np.int64).tobytes(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))
    return (3 * generator.standard_normal(vocab_size)).astype(np.float32)


def sample(raw: F32, sampling: SamplingBatch, row: int) -> tuple[int, RowLogprobs | None]:
    """A row's token, by the seam's rules in NumPy, and its log-probabilities."""
    logits = _penalised(raw.copy(), sampling, row)
    bias = slice(sampling.bias_starts[row], sampling.bias_starts[row + 1])
    np.add.at(logits, sampling.bias_ids[bias], sampling.bias_values[bias])
    token = _choose(logits, sampling, row)
    count = int(sampling.num_logprobs[row])
    return token, None if count < 0 else _logprobs(raw, token, count)


def _penalised(logits: F32, sampling: SamplingBatch, row: int) -> F32:
    history = sampling.history[sampling.history_starts[row] : sampling.history_starts[row + 1]]
    seen = np.unique(history)
    penalty = sampling.repetition_penalty[row]
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = np.bincount(history[sampling.num_prompt[row] :], minlength=len(logits))
    logits -= (sampling.frequency_penalty[row] * counts).astype(np.float32)
    logits -= (sampling.presence_penalty[row] * (counts > 0)).astype(np.float32)
    return logits


def _choose(logits: F32, sampling: SamplingBatch, row: int) -> int:
    if sampling.temperature[row] == 0:
        return int(logits.argmax())
    scaled = logits / sampling.temperature[row]
    order = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(scaled[order] - scaled.max())
    keep = probabilities >= sampling.min_p[row]
    shares = np.cumsum(probabilities) - probabilities
    keep &= shares < sampling.top_p[row] * probabilities.sum()
    if sampling.top_k[row]:
        keep[sampling.top_k[row] :] = False
    key = int(sampling.seeds[row]) << 64 | int(sampling.positions[row])
    uniform: npt.NDArray[np.float64] = np.random.Generator(np.random.Philox(key=key)).random(len(logits))
    # Gumbel's trick: the largest of these is a draw from the softmax.
    noisy = np.where(keep, scaled[order] - np.log(-np.log(uniform[order])), -np.inf)
    return int(order[noisy.argmax()])


def _columns(scores: ScoreBatch) -> tuple[list[int], list[int], list[int]]:
    return scores.hidden_rows.tolist(), scores.targets.tolist(), scores.num_top.tolist()


def scored(prefix: list[int], target: int, count: int) -> RowLogprobs:
    """What the model says about a token after a prefix, and about the ``count`` best."""
    return _logprobs(logits_of(prefix), target, count)


def _logprobs(raw: F32, token: int, count: int) -> RowLogprobs:
    logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    order: I32 = np.argsort(-raw, kind="stable").astype(np.int32)
    rank = int(np.flatnonzero(order == token)[0]) + 1
    return RowLogprobs(
        float(logprobs[token]), rank, order[:count], logprobs[order[:count]].astype(np.float32)
    )


def check_sampling(sampling: SamplingBatch, rows: int) -> None:
    for name, dtype in (
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("seeds", np.uint64),
        ("positions", np.int64),
        ("num_prompt", np.int32),
        ("num_logprobs", np.int32),
    ):
        array = getattr(sampling, name)
        assert array.shape == (rows,), name
        assert array.dtype == dtype, name
        assert array.flags.c_contiguous, name
    for starts, values in (
        (sampling.history_starts, sampling.history),
        (sampling.bias_starts, sampling.bias_ids),
        (sampling.bias_starts, sampling.bias_values),
    ):
        assert starts.shape == (rows + 1,)
        assert starts.dtype == np.int32
        assert starts[0] == 0
        assert starts[-1] == len(values)
        assert (np.diff(starts) >= 0).all()
    assert sampling.history.dtype == np.int32
    assert sampling.bias_ids.dtype == np.int32
    assert sampling.bias_values.dtype == np.float32


def fake_loader(
    generation_config: dict[str, object] | None = None, limits: DeviceLimits | None = None
) -> Callable[[EngineConfig], LoadedModel]:
    """What stands in for ``loadproof.llm.load_model``."""

    def load(config: EngineConfig) -> LoadedModel:
        return LoadedModel(config.model, FakeDevice(limits), byte_tokenizer(), generation_config or {})

    return load
