"""GGUF metadata and ``tokenizer.json`` of the same vocabulary give the same ids, those of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadproof.tokenizer import Tokenizer, TokenizerError, load_tokenizer, tokenizer_from_gguf
from loadproof.tokenizer.sentencepiece import merges_by_score

GOLDEN = Path(__file__).parent.parent / "golden" / "tokenizer"
FAMILIES = ("llama3", "llama2", "gemma")
FRAGMENTS = [
    "  ",
    "▁",
    "\n\n",
    " the",
    "'s",
    "123",
    "<tool>",
    "<s>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "é",
    "e\u0301",
]


def read(*names: str) -> Any:
    return json.loads(GOLDEN.joinpath(*names).read_text(encoding="utf-8"))


def gguf_metadata(family: str) -> dict[str, Any]:
    metadata: dict[str, Any] = read(family, "gguf.json")
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    if "tokenizer.ggml.scores" in metadata:
        metadata["tokenizer.ggml.scores"] = np.array(metadata["tokenizer.ggml.scores"], np.float32)
    return metadata


FROM_GGUF = {family: tokenizer_from_gguf(gguf_metadata(family)) for family in FAMILIES}
FROM_JSON = {family: load_tokenizer(GOLDEN / family) for family in FAMILIES}


def texts() -> st.SearchStrategy[str]:
    words = re.findall(r"\S+|\s+", "The quick brown fox 12345 Größe naïf лиса 今天天气 😀👍🏽\tb\r\n")
    parts = st.one_of(st.sampled_from(FRAGMENTS + words), st.text(max_size=6))
    return st.lists(parts, max_size=12).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", [FROM_GGUF, FROM_JSON], ids=["gguf", "json"])
def test_ids_are_those_of_transformers(family: str, source: dict[str, Tokenizer]) -> None:
    cases = read(family, "ids.json")
    assert len(cases) >= 30
    for case in cases:
        assert source[family].encode(case["text"]) == case["ids"], case["text"]


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts())
def test_both_formats_give_the_same_ids(family: str, text: str) -> None:
    for add_special_tokens in (True, False):
        ids = FROM_GGUF[family].encode(text, add_special_tokens)
        assert ids == FROM_JSON[family].encode(text, add_special_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_describe_the_same_tokens(family: str) -> None:
    ours, theirs = FROM_GGUF[family], FROM_JSON[family]
    assert ours.vocab_size == theirs.vocab_size == len(gguf_metadata(family)["tokenizer.ggml.tokens"])
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id, theirs.eos_id)
    for token_id in range(ours.vocab_size):
        assert ours.id_to_token(token_id) == theirs.id_to_token(token_id)
        assert ours.token_bytes(token_id) == theirs.token_bytes(token_id)
        assert ours.is_special(token_id) == theirs.is_special(token_id)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text())
def test_text_survives_a_round_trip(family: str, text: str) -> None:
    tokenizer = FROM_GGUF[family]
    expected = text if family == "llama3" else text.replace("▁", " ")
    assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_a_special_token_in_text_is_that_token() -> None:
    tokenizer = FROM_GGUF["llama3"]
    end = tokenizer.token_to_id("<|eot_id|>")
    assert end is not None
    assert end in tokenizer.encode("a<|eot_id|>b")
    assert tokenizer.is_special(end)
    assert tokenizer.decode([end]) == ""
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|eot_id|>"
    tool = tokenizer.token_to_id("<tool>")
    assert tool is not None
    assert not tokenizer.is_special(tool)


def test_turn_ends_of_a_file_that_does_not_name_them_end_answers() -> None:
    tokenizer = FROM_GGUF["gemma"]
    assert tokenizer.eos_token_ids == {tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("<end_of_turn>")}
    metadata = gguf_metadata("llama3") | {"tokenizer.ggml.eot_token_id": 3}
    named = {FROM_GGUF["llama3"].token_to_id(name) for name in ("<|eot_id|>", "<|im_end|>")}
    assert tokenizer_from_gguf(metadata).eos_token_ids == {3} | named


def test_flags_say_what_is_put_around_a_text() -> None:
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    tokenizer = tokenizer_from_gguf(gguf_metadata("llama2") | flags)
    assert tokenizer.encode("the") == [*FROM_GGUF["llama2"].encode("the", False), tokenizer.eos_id]
    without = {k: v for k, v in gguf_metadata("llama2").items() if "add_" not in k and "_token_id" not in k}
    assert tokenizer_from_gguf(without).encode("the") == FROM_GGUF["llama2"].encode("the")


def test_chat_templates_are_read_by_name() -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    tokenizer = tokenizer_from_gguf(gguf_metadata("llama3") | templates)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "with tools"


def test_a_vocabulary_too_small_for_the_default_special_tokens() -> None:
    values = {"model": "llama", "tokens": ["a", "b"], "scores": [0.0, 0.0]}
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, None)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("llama3", "model", "bert", "model 'bert' is not supported; known: gpt2, llama"),
        ("llama3", "model", None, "model None is not supported"),
        (
            "llama3",
            "pre",
            "no-such-words",
            "pre-tokenizer 'no-such-words' is not supported; known: command-r",
        ),
        ("llama3", "tokens", None, "tokens is missing"),
        ("llama3", "tokens", ["a", 3], "tokens is missing or not a list of strings"),
        ("llama3", "tokens", ["a", "b", "a"], "tokens has 'a' twice"),
        ("llama3", "merges", None, "merges is missing"),
        ("llama3", "merges", ["a b c"], "merges has a line that is not two tokens"),
        ("llama3", "merges", ["nowhere here"], "merges do not fit the vocabulary"),
        ("llama3", "token_type", [1, 1], "token_type has 2 entries for"),
        ("llama3", "bos_token_id", 10**9, "bos_token_id is 1000000000, of"),
        ("llama3", "eos_token_id", -1, "eos_token_id is -1, of"),
        ("llama2", "scores", None, "scores is missing"),
        ("llama2", "scores", [0.0], "scores has 1 entries for"),
        ("llama2", "scores", ["a"], "scores is not a list of numbers"),
        ("llama2", "scores", 3, "scores is not a list of numbers"),
        ("llama2", "tokens", [], "tokens is empty"),
        ("llama3", "bos_token_id", "1", "bos_token_id is '1', not a token id"),
        ("llama3", "bos_token_id", True, "bos_token_id is True, not a token id"),
        ("llama3", "bos_token_id", np.array([1]), "bos_token_id is .*, not a token id"),
        ("llama3", "model", ["llama"], "model .* is not supported"),
        ("llama3", "model", np.array([1, 2]), "model .* is not supported"),
        ("llama3", "pre", np.array([1, 2]), "pre is .*, not a name"),
        ("llama3", "add_bos_token", np.array([1, 2]), "add_bos_token is .*, not true or false"),
        ("llama2", "add_space_prefix", "no", "add_space_prefix is 'no', not true or false"),
        ("llama3", "token_type", "12", "token_type is not a list of numbers"),
        ("llama3", "tokens", "ab", "tokens is missing or not a list of strings"),
    ],
)
def test_malformed_metadata_is_refused_by_key(family: str, key: str, value: Any, message: str) -> None:
    metadata = gguf_metadata(family) | {f"tokenizer.ggml.{key}": value}
    if key == "tokens" and value:
        metadata["tokenizer.ggml.token_type"] = [1] * len(value)
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(metadata)


def test_what_the_library_panics_at_is_an_error() -> None:
    values = {"model": "gpt2", "tokens": ["a", "b"], "merges": ["a b"]}
    with pytest.raises(TokenizerError, match="merges do not fit the vocabulary"):
        tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})


class CountedSlices(str):
    """A piece that notes where it is cut."""

    cuts: set[int]

    def __getitem__(self, part: Any) -> str:
        self.cuts.add(part.start if part.stop is None else part.stop)
        return super().__getitem__(part)


def test_a_long_piece_is_cut_only_where_both_parts_may_be_tokens() -> None:
    piece = CountedSlices("x" * 1000)
    piece.cuts = set()
    vocab = {token: index for index, token in enumerate(["x", "x" * 10, "x" * 990, "y" * 999, piece])}
    assert merges_by_score(vocab, [(piece, 0.0)]) == [("x" * 990, "x" * 10), ("x" * 10, "x" * 990)]
    assert piece.cuts == {999, 990, 10, 1}
