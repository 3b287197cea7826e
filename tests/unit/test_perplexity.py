from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_models import write_model

from loadproof import LLM
from loadproof.perplexity import TextScore, Window, total, windows
from loadproof.scoring import ScoreError

LENGTH = 160
TEXT = "Tides rise twice a day.\nTen thin hats, one tin.  \u00e9\n" * 8


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = write_model(tmp_path_factory.mktemp("model") / "llama", "llama")
    with LLM(directory, num_threads=1, max_model_len=LENGTH) as loaded:
        yield loaded


@given(st.integers(1, 300), st.integers(2, 40), st.data())
def test_windows_score_each_token_but_the_first_once(num_tokens: int, size: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, size - 1))
    scored: list[int] = []
    for index, (start, stop, num_scored) in enumerate(windows(num_tokens, size, stride)):
        assert 0 <= start < stop - num_scored
        assert stop - start == min(size, num_tokens)
        assert index == 0 or num_scored <= stride
        scored += range(stop - num_scored, stop)
    assert scored == list(range(1, num_tokens))


def test_windows_are_the_harnesss() -> None:
    # Its example: ten tokens after a prefix, four of context, so windows of five with what they predict.
    assert list(windows(11, 5, 4)) == [Window(0, 5, 4), Window(4, 9, 4), Window(6, 11, 2)]


@pytest.mark.parametrize(
    ("window", "stride"), [(None, None), (64, None), (64, 16), (2, 1), (np.int64(64), np.int32(16))]
)
def test_a_text_is_scored_window_by_window(llm: LLM, window: int | None, stride: int | None) -> None:
    tokens = [0, *llm.tokenizer.encode(TEXT)]
    assert len(tokens) > 2 * LENGTH
    size = window or LENGTH - 1
    logprobs: list[float] = []
    for start, stop, num_scored in windows(len(tokens), size, stride or size - 1):
        split = stop - num_scored
        logprobs += llm.score(tokens[start:split], [tokens[split:stop]])[0].token_logprobs
    (score,) = llm.score_texts([TEXT], window=window, stride=stride)
    assert score.logprob == float(np.cumsum(np.array(logprobs))[-1])
    assert score.num_tokens == len(tokens) - 1
    assert score.num_words == 8 * 11
    assert score.num_bytes == len(TEXT) + 8


def test_texts_together_are_each_alone(llm: LLM) -> None:
    texts = [TEXT, "tea", TEXT[:100]]
    assert llm.score_texts(texts) == [llm.score_texts([text])[0] for text in texts]
    assert llm.score_texts([]) == []


def test_perplexities() -> None:
    score = TextScore(logprob=-6.0, num_tokens=3, num_words=2, num_bytes=12)
    assert score.token_perplexity == math.exp(2)
    assert score.word_perplexity == math.exp(3)
    assert score.byte_perplexity == math.exp(0.5)
    assert score.bits_per_byte == pytest.approx(0.5 / math.log(2))
    assert total([score, score]) == TextScore(-12.0, 6, 4, 24)
    assert TextScore(-1e6, 1, 1, 1).token_perplexity == math.inf
    assert math.isnan(TextScore(-1.0, 1, 0, 1).word_perplexity)
    assert math.isnan(total([]).bits_per_byte)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "a window of 1 tokens; from 2 to 159 fit"),
        ({"window": LENGTH}, "a window of 160 tokens; from 2 to 159 fit"),
        ({"stride": 0}, "a stride of 0 tokens; it is from 1 to 158"),
        ({"window": 10, "stride": 10}, "a stride of 10 tokens; it is from 1 to 9"),
        ({"window": "3"}, "window is a number of tokens, not '3'"),
        ({"window": 3.5}, "window is a number of tokens, not 3.5"),
        ({"stride": True}, "stride is a number of tokens, not True"),
    ],
)
def test_sizes_that_can_not_be(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoreError, match=message):
        llm.score_texts(["tea"], **options)


@pytest.mark.parametrize("texts", ["abc", b"abc", None, 5])
def test_texts_are_a_list(llm: LLM, texts: Any) -> None:
    with pytest.raises(ScoreError, match=f"texts are a list, not {type(texts).__name__}"):
        llm.score_texts(texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "it is empty"), ("\ud800", "lone surrogate"), (5, "a text is a string, not int")],
)
def test_texts_that_can_not_be(llm: LLM, text: Any, message: str) -> None:
    before = llm.stats()["num_requests"]
    with pytest.raises(ScoreError, match=f"text 2 of 2: .*{message}") as found:
        llm.score_texts(["tea", text])
    assert found.value.context_index == 1
    assert llm.stats()["num_requests"] == before
