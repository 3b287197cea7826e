"""How likely continuations are after their contexts: what evaluation harnesses and rerankers ask for.

Everything of a call is computed together, so contexts and prefixes that are shared are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadproof.devices.device import F32, I32
from loadproof.engine.admission import ClosedError, RequestError, TooLongError
from loadproof.engine.prompt_logprobs import PromptLogprobs
from loadproof.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from loadproof.engine.output import RequestOutput
    from loadproof.llm import LLM
    from loadproof.tokenizer.tokenizer import Tokenizer

Text = str | Sequence[int] | npt.NDArray[np.integer[Any]]
"""Text, or token ids that are taken as they are."""

# Of one call of generate, whose outputs take about 64 bytes a token until they are read.
_MOST_TOKENS = 1 << 21
_MOST_TEXTS = 4096  # encoded at a time: lists of ids take ten times the memory of arrays
# One best token besides, since ranks alone don't tell which of several equally likely tokens is taken. With a
# seed of its own scoring leaves those of later requests alone.
SCORING_PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, seed=0)


class ScoreError(RequestError):
    """Something that can't be scored; ``context_index`` is the place of its context or text in the call."""

    context_index: int | None = None


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """The natural log-probability of a continuation after its context.

    ``logprob`` is the sum of ``token_logprobs``, added in order in float64. ``is_greedy`` tells whether
    temperature 0 would have generated just these tokens. ``num_bytes`` are those of the continuation as it
    was given: of its text in UTF-8, or of what its token ids stand for. ``num_dropped`` are tokens at the
    context's start that were left out because it was too long.
    """

    logprob: float
    is_greedy: bool
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]  # float32 values
    num_bytes: int
    num_dropped: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that were scored."""
        return len(self.token_ids)


class _TooLongError(ScoreError, TooLongError):
    """A pair that doesn't fit the model's length."""


class Scorable(NamedTuple):
    """A sequence of tokens whose last ``num_scored`` are scored after all that come before them."""

    token_ids: I32
    num_scored: int


def score(
    llm: LLM,
    contexts: Sequence[Text],
    continuations: Sequence[Sequence[Text]],
    truncate: bool,
    use_tqdm: bool,
) -> list[list[ContinuationScore]]:
    """Scores of ``continuations[i]`` after ``contexts[i]``; see :meth:`loadproof.llm.LLM.score`."""
    call = ScoreCall(llm, contexts, continuations, truncate)
    return call.scores(run(llm, call.scorables, use_tqdm))


class ScoreCall:
    """What a call scores: sequences of tokens made of contexts and continuations, and the way back.

    Raises :class:`ScoreError`, naming the context, where one can't be scored.
    """

    def __init__(
        self, llm: LLM, contexts: Sequence[Text], continuations: Sequence[Sequence[Text]], truncate: bool
    ) -> None:
        _check_lists(contexts, continuations)
        self._num_contexts = len(contexts)
        self._joined = _Joiner(llm.tokenizer, llm.engine.device.vocab_size).join(contexts, continuations)
        self.scorables: list[Scorable] = []
        for (place, _), scorable in self._joined:
            with place.named():
                self.scorables.append(_fitted(scorable, llm.max_model_len - 1, truncate))

    def scores(self, found: Iterable[tuple[F32, bool]]) -> list[list[ContinuationScore]]:
        """Each context's scores from what :func:`scored` says of each sequence, in order."""
        scores: list[list[ContinuationScore]] = [[] for _ in range(self._num_contexts)]
        parts = zip(self._joined, self.scorables, found, strict=True)
        for ((place, num_bytes), whole), part, (logprobs, is_greedy) in parts:
            token_ids = tuple(part.token_ids[-part.num_scored :].tolist())
            each = tuple(logprobs.tolist())
            num_dropped = len(whole.token_ids) - len(part.token_ids)
            scores[place.context].append(
                ContinuationScore(in_order(logprobs), is_greedy, token_ids, each, num_bytes, num_dropped)
            )
        return scores


def run(llm: LLM, scorables: Sequence[Scorable], use_tqdm: bool) -> Iterator[tuple[F32, bool]]:
    """For each sequence the log-probabilities of its scored tokens, and whether all of them are greedy."""
    check_mode(llm)
    start = 0
    while start < len(scorables):
        stop, num_tokens = start, 0
        while stop < len(scorables) and (stop == start or num_tokens < _MOST_TOKENS):
            num_tokens += len(scorables[stop].token_ids)
            stop += 1
        group = scorables[start:stop]
        outputs = llm.generate([scorable.token_ids for scorable in group], SCORING_PARAMS, use_tqdm=use_tqdm)
        for scorable, output in zip(group, outputs, strict=True):
            yield scored(output, scorable.num_scored)
        start = stop


def check_mode(llm: LLM) -> None:
    """Refuse to score where log-probabilities are none, or not to be had."""
    mode = llm.config.logprobs_mode
    if mode.endswith("logits"):
        raise ScoreError(f"scores are made of log-probabilities, and logprobs_mode is {mode}")
    if llm.config.max_logprobs == 0:
        raise ScoreError("scores are made of log-probabilities, and max_logprobs is 0")


def scored(output: RequestOutput, num_scored: int) -> tuple[F32, bool]:
    """From a request with :data:`SCORING_PARAMS`: its last tokens' log-probabilities, and whether greedy."""
    found = output.prompt_logprobs
    if not isinstance(found, PromptLogprobs):
        raise ScoreError("a request was aborted before it was scored")
    # A token of rank 1 that isn't the best one shares its place with a lower id: its dict holds both.
    is_greedy = bool((found.token_ranks[-num_scored:] == 1).all()) and all(
        len(position or ()) == 1 for position in found[len(found) - num_scored :]
    )
    return found.token_logprobs[-num_scored:].copy(), is_greedy


def in_order(logprobs: F32) -> float:
    """The sum in float64, one after another: the same on every machine and in every version of Python."""
    return float(np.cumsum(logprobs, dtype=np.float64)[-1])


def prefix_token(tokenizer: Tokenizer) -> int:
    """The token that stands before a text without context: BOS, or else the end of a text before it."""
    for token_id in (tokenizer.bos_id, tokenizer.eos_id):
        if token_id is not None:
            return token_id
    raise ScoreError("the context is empty, and the model has no token that begins or ends a text")


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts; one that begins with BOS, as chat templates write it, is given no second one."""
    bos = None if tokenizer.bos_id is None else tokenizer.id_to_token(tokenizer.bos_id)
    begun = [bos is not None and text.startswith(bos) for text in texts]
    encoded: dict[int, list[int]] = {}
    for has_bos in (False, True):
        places = [place for place, has in enumerate(begun) if has == has_bos]
        ids = tokenizer.encode_batch([texts[place] for place in places], add_special_tokens=not has_bos)
        encoded.update(zip(places, ids, strict=True))
    return [encoded[place] for place in range(len(texts))]


def utf8(text: str) -> bytes:
    """A text's bytes; raises :class:`ScoreError` for one that is not Unicode (lone surrogates)."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ScoreError(f"the text has a lone surrogate at position {error.start}") from error


def is_one(text: object) -> bool:
    """Whether this is one :data:`Text`, rather than a list of them."""
    if isinstance(text, np.ndarray):
        return text.ndim == 1 and (len(text) == 0 or not isinstance(text[0], str | Sequence | np.ndarray))
    if isinstance(text, Sequence) and not isinstance(text, str | bytes):
        return len(text) == 0 or isinstance(text[0], int | np.integer)
    return isinstance(text, str)


@dataclass(frozen=True, slots=True)
class _Place:
    """Which continuation of which context, for those who read an error."""

    context: int
    continuation: int | None
    num_contexts: int

    @contextmanager
    def named(self) -> Iterator[None]:
        """Have an error say whom it is about."""
        try:
            yield
        except ClosedError:
            raise
        except ValueError as error:
            parts = [f"context {self.context + 1} of {self.num_contexts}"] if self.num_contexts > 1 else []
            parts += [] if self.continuation is None else [f"continuation {self.continuation + 1}"]
            located = ScoreError(f"{', '.join(parts)}: {error}" if parts else str(error))
            located.context_index = self.context
            raise located from error


_Joined = list[tuple[tuple[_Place, int], Scorable]]  # with the continuation's number of bytes


class _Joiner:
    """Joins contexts and continuations into tokens, as lm-evaluation-harness does, so that scores agree.

    White space at the end of a context's text goes to the continuation, where a word's token begins with it.
    The two texts are then encoded together, and the tokens from the number on that the context alone has are
    the continuation's. Token ids on either side are joined as they are.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def join(self, contexts: Sequence[Text], continuations: Sequence[Sequence[Text]]) -> _Joined:
        """All pairs in order."""
        joined: _Joined = []
        for index, (context, parts) in enumerate(zip(contexts, continuations, strict=True)):
            with _Place(index, None, len(contexts)).named():
                text, ids = self._context(context)
            for first in range(0, len(parts), _MOST_TEXTS):
                some = parts[first : first + _MOST_TEXTS]
                places = [_Place(index, first + i, len(contexts)) for i in range(len(some))]
                sizes = [self._num_bytes(part, place) for part, place in zip(some, places, strict=True)]
                pairs = self._pairs(text, ids, some)
                for place, size, pair in zip(places, sizes, pairs, strict=True):
                    with place.named():
                        joined.append(((place, size), self._scorable(*pair)))
        return joined

    def _context(self, context: Text) -> tuple[str, list[int]]:
        """A context's text, or its token ids: one of them is empty."""
        if not isinstance(context, str):
            return "", self._ids(context)
        utf8(context)
        return context, []

    def _pairs(
        self, text: str, ids: list[int], parts: Sequence[Text]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """The context's and the continuation's tokens, for each continuation."""
        kept = text.rstrip()
        tail = text[len(kept) :]
        texts = [part for part in parts if isinstance(part, str)]
        kept_ids = encode_texts(self._tokenizer, [kept])[0] if kept else ids
        if kept:
            wholes = encode_texts(self._tokenizer, [text + part for part in texts])
            encoded = iter([whole[len(kept_ids) :] for whole in wholes])
        else:
            encoded = iter(self._tokenizer.encode_batch([tail + part for part in texts], False))
        all_ids = encode_texts(self._tokenizer, [text])[0] if text and len(texts) < len(parts) else ids
        for part in parts:
            yield (kept_ids, next(encoded)) if isinstance(part, str) else (all_ids, list(part))

    def _scorable(self, context_ids: list[int], part_ids: list[int]) -> Scorable:
        if not part_ids:
            raise ScoreError("it adds no tokens to its context")
        if not context_ids:
            context_ids = [prefix_token(self._tokenizer)]
            if part_ids[0] == context_ids[0] and len(part_ids) > 1:
                part_ids = part_ids[1:]  # it brought its own
        return Scorable(np.array([*context_ids, *part_ids], np.int32), len(part_ids))

    def _num_bytes(self, part: Text, place: _Place) -> int:
        with place.named():
            if isinstance(part, str):
                return len(utf8(part))
            return sum(len(self._tokenizer.token_bytes(token_id)) for token_id in self._ids(part))

    def _ids(self, ids: object) -> list[int]:
        if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, bytes) or not is_one(ids):
            raise ScoreError(f"text or a list of token ids, not {type(ids).__name__}")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                raise ScoreError(f"token ids are integers, not {token_id!r:.100}")
            if not 0 <= token_id < self._vocab_size:
                raise ScoreError(f"token id {token_id} is outside the vocabulary of {self._vocab_size}")
        return [int(token_id) for token_id in ids]


def _fitted(scorable: Scorable, limit: int, truncate: bool) -> Scorable:
    token_ids, num_scored = scorable
    if len(token_ids) <= limit:
        return scorable
    if truncate and num_scored < limit:
        return Scorable(token_ids[-limit:], num_scored)
    raise _TooLongError(
        f"{len(token_ids) - num_scored} tokens of context and {num_scored} to score; "
        f"at most {limit} fit in max_model_len {limit + 1}"
    )


def check_list(what: str, given: object) -> None:
    """Refuse what is no list, nor an array with rows: the letters of a text are no texts."""
    is_list = given.ndim > 0 if isinstance(given, np.ndarray) else isinstance(given, Sequence)
    if not is_list or isinstance(given, str | bytes):
        raise ScoreError(f"{what} a list, not {type(given).__name__}")


def _check_lists(contexts: Sequence[Text], continuations: Sequence[Sequence[Text]]) -> None:
    check_list("contexts are", contexts)
    check_list("continuations is", continuations)
    if len(contexts) != len(continuations):
        raise ScoreError(f"{len(contexts)} contexts and {len(continuations)} lists of continuations")
    for index, parts in enumerate(continuations):
        with _Place(index, None, len(contexts)).named():
            check_list("continuations are", parts)
