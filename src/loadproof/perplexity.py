"""How well a model predicts whole texts, also beyond its context: rolling log-likelihood, perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadproof.scoring import Scorable, ScoreError, check_list, in_order, prefix_token, run, utf8

if TYPE_CHECKING:
    from loadproof.llm import LLM


@dataclass(frozen=True, slots=True)
class TextScore:
    """The natural log-probability of a whole text; words are what white space separates, bytes UTF-8's.

    The perplexity by a unit is ``exp(-logprob / number of units)``; NaN for a text without any.
    """

    logprob: float
    num_tokens: int
    num_words: int
    num_bytes: int

    @property
    def token_perplexity(self) -> float:
        """Depends on the tokenizer: not to be compared between models with different ones."""
        return self._perplexity(self.num_tokens)

    @property
    def word_perplexity(self) -> float:
        """By word."""
        return self._perplexity(self.num_words)

    @property
    def byte_perplexity(self) -> float:
        """By byte of UTF-8."""
        return self._perplexity(self.num_bytes)

    @property
    def bits_per_byte(self) -> float:
        """Bits that the text takes if the model is used to compress it, by byte."""
        return -self.logprob / (self.num_bytes * math.log(2)) if self.num_bytes else math.nan

    def _perplexity(self, num_units: int) -> float:
        if not num_units:
            return math.nan
        try:
            return math.exp(-self.logprob / num_units)
        except OverflowError:
            return math.inf


def total(scores: Iterable[TextScore]) -> TextScore:
    """Several texts as one: the perplexities weigh each text by its length."""
    listed = list(scores)
    return TextScore(
        math.fsum(score.logprob for score in listed),
        sum(score.num_tokens for score in listed),
        sum(score.num_words for score in listed),
        sum(score.num_bytes for score in listed),
    )


class Window(NamedTuple):
    """Tokens ``start`` to ``stop`` of a text, of which the last ``num_scored`` are new."""

    start: int
    stop: int
    num_scored: int


def windows(num_tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Windows over so many tokens that score each but the first exactly once, ``stride`` at a time.

    The first window scores all its tokens but one. Each later one is as long, and its tokens before the
    scored ones are context.
    """
    assert 0 < stride < size
    scored = 1
    stop = min(size, num_tokens)
    while scored < num_tokens:
        yield Window(max(0, stop - size), stop, stop - scored)
        scored, stop = stop, min(stop + stride, num_tokens)


def score_texts(
    llm: LLM, texts: Sequence[str], window: int | None, stride: int | None, use_tqdm: bool
) -> list[TextScore]:
    """See :meth:`loadproof.llm.LLM.score_texts`."""
    check_list("texts are", texts)
    size, step = _sizes(llm.max_model_len - 1, window, stride)
    scorables: list[Scorable] = []
    counts = []
    for index, text in enumerate(texts):
        cut = _windows_of(llm, text, size, step, index, len(texts))
        scorables += cut
        counts.append(len(cut))
    found = run(llm, scorables, use_tqdm)
    scores = []
    for text, count in zip(texts, counts, strict=True):
        logprobs = np.concatenate([next(found)[0] for _ in range(count)])
        scores.append(TextScore(in_order(logprobs), len(logprobs), len(text.split()), len(text.encode())))
    return scores


def _windows_of(llm: LLM, text: str, size: int, stride: int, index: int, count: int) -> list[Scorable]:
    try:
        if not isinstance(text, str):
            raise ScoreError(f"a text is a string, not {type(text).__name__}")
        utf8(text)
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise ScoreError("it is empty")
        tokens = np.array([prefix_token(llm.tokenizer), *ids], np.int32)
    except ScoreError as error:
        located = ScoreError(f"text {index + 1} of {count}: {error}")
        located.context_index = index
        raise located from error
    return [
        Scorable(tokens[start:stop], num_scored)
        for start, stop, num_scored in windows(len(tokens), size, stride)
    ]


def _sizes(limit: int, window: int | None, stride: int | None) -> tuple[int, int]:
    for name, value in (("window", window), ("stride", stride)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
            raise ScoreError(f"{name} is a number of tokens, not {value!r:.100}")
    size = limit if window is None else int(window)
    if not 2 <= size <= limit:
        raise ScoreError(f"a window of {size} tokens; from 2 to {limit} fit in max_model_len {limit + 1}")
    step = size - 1 if stride is None else int(stride)
    if not 1 <= step < size:
        raise ScoreError(f"a stride of {step} tokens; it is from 1 to {size - 1}, below the window of {size}")
    return size, step
