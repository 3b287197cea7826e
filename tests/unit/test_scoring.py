from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.fake_device import SPECIALS, byte_tokenizer
from tests.tiny_models import TINY, TinySource, write_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from loadproof import LLM, SamplingParams, scoring
from loadproof.devices.reference import ReferenceDevice
from loadproof.scoring import ContinuationScore, ScoreError
from loadproof.tokenizer.chat import ChatTemplates
from loadproof.tokenizer.tokenizer import SpecialTokens, Tokenizer

LENGTH = 160
CONTEXTS = ["the rain in", "the rain in ", "", "a note on the tides \n", "  ", "sky"]
PARTS = ["spain", " spain", "the ante", "\n\nto", "e"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, num_threads=1, max_model_len=LENGTH, seed=7) as loaded:
        yield loaded


def _ids(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(2, 258, count).tolist()
    return found


def _harness_pair(llm: LLM, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """How lm-evaluation-harness splits the tokens of a pair, from its documentation."""
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if not kept:
        return [0], llm.tokenizer.encode(continuation)
    alone = llm.tokenizer.encode(kept)
    return alone, llm.tokenizer.encode(kept + continuation)[len(alone) :]


def test_log_probabilities_are_the_oracles(llm: LLM) -> None:
    context, parts = _ids(1, 20), [_ids(2, 1), _ids(3, 7)]
    oracle = ReferenceDevice(TINY["llama"].graph, TINY["llama"].source)
    for part, score in zip(parts, llm.score(context, parts), strict=True):
        logits = oracle.forward(context + part).astype(np.float64)
        logprobs = logits - logits.max(axis=1, keepdims=True)
        logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
        expected = logprobs[np.arange(19, 19 + len(part)), part]
        np.testing.assert_allclose(score.token_logprobs, expected, atol=0.2)
        assert score.token_ids == tuple(part)
        assert score.num_tokens == len(part)


def test_the_sum_is_added_in_order_in_float64(llm: LLM) -> None:
    (score,) = llm.score(_ids(1, 5), [_ids(4, 100)])
    total = 0.0
    for logprob in score.token_logprobs:
        assert logprob == float(np.float32(logprob))
        total += logprob
    assert score.logprob == total


@pytest.mark.parametrize("context", CONTEXTS)
def test_texts_are_joined_as_the_harness_joins_them(llm: LLM, context: str) -> None:
    pairs = [_harness_pair(llm, context, part) for part in PARTS]
    assert all(tokens for _, tokens in pairs)
    expected = [llm.score(before, [tokens])[0] for before, tokens in pairs]
    for part, score, other in zip(PARTS, llm.score(context, PARTS), expected, strict=True):
        assert score.token_ids == other.token_ids
        assert score.token_logprobs == other.token_logprobs
        assert score.num_bytes == len(part)


def test_together_is_alone(llm: LLM) -> None:
    together = llm.score(CONTEXTS, [PARTS] * len(CONTEXTS))
    llm.reset_prefix_cache()
    alone = [[llm.score(context, [part])[0] for part in PARTS] for context in CONTEXTS]
    assert together == alone


def test_many_tokens_go_group_by_group(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.score(CONTEXTS, [PARTS] * len(CONTEXTS))
    monkeypatch.setattr(scoring, "_MOST_TOKENS", 30)
    monkeypatch.setattr(scoring, "_MOST_TEXTS", 2)
    assert llm.score(CONTEXTS, [PARTS] * len(CONTEXTS)) == expected


def test_ids_and_texts_may_be_mixed(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the rain ")
    part = llm.tokenizer.encode("tea")
    forms = [
        llm.score("the rain ", [part])[0],
        llm.score(ids, [part])[0],
        llm.score(np.array(ids), [np.array(part)])[0],
        llm.score([ids], [["tea"]])[0][0],
    ]
    assert forms == [forms[0]] * len(forms)
    assert forms[0].num_bytes == 3


def test_what_temperature_0_generates_is_greedy(llm: LLM) -> None:
    context = _ids(5, 12)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    best = llm.generate(context, params)[0].outputs[0].token_ids
    other = [*best[:-1], (best[-1] + 1) % 200]
    assert [score.is_greedy for score in llm.score(context, [best, best[:1], other])] == [True, True, False]


def test_of_equally_likely_tokens_only_the_one_taken_is_greedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TinySource.read

    def twins(self: TinySource, name: str) -> Any:
        weight = read(self, name)
        if name == "lm_head.weight":
            weight[1::2] = weight[::2]
        return weight

    assert "lm_head.weight" in TINY["mistral"].source.shapes()
    monkeypatch.setattr(TinySource, "read", twins)
    with LLM(write_model(tmp_path / "twins", "mistral"), num_threads=1) as llm:
        context = _ids(6, 9)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (best,) = llm.generate(context, params)[0].outputs[0].token_ids
        assert best % 2 == 0
        first, second = llm.score(context, [[best], [best + 1]])
        assert first.logprob == second.logprob
        assert (first.is_greedy, second.is_greedy) == (True, False)


def test_an_empty_context_is_the_token_that_begins_a_text(llm: LLM) -> None:
    (expected,) = llm.score([0], [llm.tokenizer.encode("tea")])
    assert llm.score("", ["tea"]) == [expected]
    assert llm.score([], ["tea"]) == [expected]
    (brought,) = llm.score("", ["<s>tea"])
    assert brought.token_ids == expected.token_ids
    assert brought.logprob == expected.logprob


def test_the_first_token_of_a_text_follows_bos_or_the_end_of_another() -> None:
    def prefix(bos: int | None, eos: int | None) -> int:
        tokenizer: Any = SimpleNamespace(bos_id=bos, eos_id=eos)
        return scoring.prefix_token(tokenizer)

    assert (prefix(0, 1), prefix(None, 1)) == (0, 1)
    with pytest.raises(ScoreError, match="no token that begins or ends a text"):
        prefix(None, None)


def test_a_text_that_begins_with_bos_is_given_no_second_one() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = Tokenizer(backend, SpecialTokens(256), ChatTemplates())
    plain, chat = tokenizer.encode("hi", add_special_tokens=False), tokenizer.encode("<s>hi")
    assert chat == [256, 256, *plain]
    found = scoring.encode_texts(tokenizer, ["hi", "<s>hi", "hi"])
    assert found == [[256, *plain]] * 3
    no_bos = scoring.encode_texts(byte_tokenizer(), [SPECIALS[0] + "a"])
    assert no_bos == [byte_tokenizer().encode("<s>a")]


def test_a_context_that_is_too_long_is_cut_only_on_demand(llm: LLM) -> None:
    context, part = _ids(8, LENGTH), _ids(9, 4)
    with pytest.raises(ScoreError, match="160 tokens of context and 4 to score; at most 159 fit"):
        llm.score(context, [part])
    (cut,) = llm.score(context, [part], truncate_context=True)
    (expected,) = llm.score(context[5:], [part])
    assert cut.num_dropped == 5
    assert expected.num_dropped == 0
    assert (cut.logprob, cut.token_ids) == (expected.logprob, expected.token_ids)
    with pytest.raises(ScoreError, match="1 tokens of context and 159 to score"):
        llm.score([3], [_ids(10, LENGTH - 1)], truncate_context=True)


@pytest.mark.parametrize(
    ("continuations", "message"),
    [
        ([["a"], ["b", []]], "context 2 of 2, continuation 2: it adds no tokens"),
        ([["a"], ["b", "\ud800"]], "context 2 of 2, continuation 2: the text has a lone surrogate"),
        ([["a"], ["b", [3, 288]]], "context 2 of 2, continuation 2: token id 288 is outside"),
        ([["a"], ["b", [3, -1]]], "context 2 of 2, continuation 2: token id -1 is outside"),
        ([["a"], ["b", [3, "x"]]], "context 2 of 2, continuation 2: token ids are integers, not 'x'"),
        ([["a"], ["b", [True]]], "context 2 of 2, continuation 2: token ids are integers, not True"),
        ([["a"], ["b", None]], "context 2 of 2, continuation 2: text or a list of token ids, not NoneType"),
        ([["a"], ["b", b"c"]], "context 2 of 2, continuation 2: text or a list of token ids, not bytes"),
        ([["a"], "b"], "context 2 of 2: continuations are a list, not str"),
        ([["a"]], "2 contexts and 1 lists of continuations"),
        ("ab", "continuations is a list, not str"),
    ],
)
def test_errors_name_the_pair_before_anything_is_computed(llm: LLM, continuations: Any, message: str) -> None:
    before = llm.stats()["num_requests"]
    with pytest.raises(ScoreError, match=message):
        llm.score(["one ", "two "], continuations)
    assert llm.stats()["num_requests"] == before


def test_errors_about_contexts_carry_their_place(llm: LLM) -> None:
    contexts: list[Any] = ["one ", 5]
    with pytest.raises(ScoreError, match="context 2 of 2: text or a list of token ids, not int") as found:
        llm.score(contexts, [["a"], ["a"]])
    assert found.value.context_index == 1
    with pytest.raises(ScoreError, match=r"^continuation 1: it adds no tokens"):
        llm.score("one", [""])


def test_nothing_to_score(llm: LLM) -> None:
    nothing: list[str] = []
    assert llm.score("one", nothing) == []
    assert llm.score(["one", "two"], [[], ["a"]])[0] == []
    assert llm.score([], []) == []


def test_a_shared_context_is_computed_once(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.stats()
    llm.score(_ids(11, 128), [[token] for token in range(2, 34)])
    after = llm.stats()
    computed = after["prompt_tokens"] - before["prompt_tokens"]
    computed -= after["prefix_cache_hits"] - before["prefix_cache_hits"]
    assert computed <= 128 + 32 * 33


def test_scoring_leaves_the_seeds_of_others_alone(directory: Path) -> None:
    def seeds(scores: bool) -> list[int]:
        with LLM(directory, num_threads=1, max_model_len=LENGTH, seed=3) as fresh:
            found = []
            for _ in range(2):
                found.append(fresh.generate("a", SamplingParams(max_tokens=1))[0].outputs[0].seed)
                if scores:
                    fresh.score("a", ["b"])
            return found

    assert seeds(True) == seeds(False)


@pytest.mark.parametrize("contexts", [None, 5, b"abc"])
def test_contexts_are_a_list(llm: LLM, contexts: Any) -> None:
    with pytest.raises(ScoreError, match=f"contexts are a list, not {type(contexts).__name__}"):
        llm.score(contexts, ["a"])


def test_arrays_are_lists(llm: LLM) -> None:
    array: Any = np.array
    contexts, words, ids = ["a", "bc"], [["b", "c"], ["d", "e"]], [[5, 6], [7, 8]]
    assert llm.score(array(contexts), array(words)) == llm.score(contexts, words)
    assert llm.score(array(ids[0], object), ["a"]) == llm.score(ids[0], ["a"])
    assert llm.score(array(ids), array([ids, ids])) == llm.score(ids, [ids, ids])
    assert llm.score_texts(array(["a b", "c"])) == llm.score_texts(["a b", "c"])


def test_a_request_that_a_hook_aborts_is_an_error(directory: Path) -> None:
    with LLM(directory, max_model_len=64) as other:
        ended: list[str] = []

        def abort(request_id: str, *_: object) -> None:
            if not ended:
                ended.append(request_id)
                other.engine.abort_request(str(int(request_id) + 1))

        other.on_logits(abort)
        with pytest.raises(ScoreError, match="aborted before it was scored"):
            other.score("a", [[5], [6], [7]])
        assert other.stats()["num_running"] == 0


def test_scores_need_log_probabilities(directory: Path) -> None:
    with (
        LLM(directory, max_model_len=64, max_logprobs=0) as other,
        pytest.raises(ScoreError, match="max_logprobs is 0"),
    ):
        other.score("a", ["b"])


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_scores_are_never_made_of_logits(llm: LLM, directory: Path, mode: str) -> None:
    with LLM(directory, num_threads=1, max_model_len=LENGTH, logprobs_mode=mode) as other:
        if mode == "processed_logprobs":
            assert other.score("a", [" b"]) == llm.score("a", [" b"])
            return
        with pytest.raises(ScoreError, match=f"logprobs_mode is {mode}"):
            other.score("a", [" b"])


def test_a_score_can_be_compared() -> None:
    one = ContinuationScore(-1.5, True, (3,), (-1.5,), 2)
    assert one == ContinuationScore(-1.5, True, (3,), (-1.5,), 2)
    assert one != ContinuationScore(-1.5, True, (3,), (-1.5,), 2, num_dropped=1)
