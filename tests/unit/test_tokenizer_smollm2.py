"""The real model's tokenizer, rebuilt from its GGUF file, against transformers on the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadproof.tokenizer import Tokenizer, tokenizer_from_gguf
from loadproof.weights.checkpoint import open_checkpoint
from loadproof.weights.resolve import resolve_model

pytestmark = pytest.mark.real_model
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "golden" / "tokenizer" / "smollm2.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    metadata = open_checkpoint(resolve_model("smollm2-135m")).metadata
    assert metadata is not None
    return tokenizer_from_gguf(metadata)


def test_ids(tokenizer: Tokenizer) -> None:
    for case in GOLDEN["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]


def test_chats(tokenizer: Tokenizer) -> None:
    for case in GOLDEN["chats"]:
        assert tokenizer.apply_chat_template(case["messages"]) == case["prompt"]
        assert tokenizer.encode_chat(case["messages"]) == case["ids"]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special(token_id)] == [
        *range(17)
    ]


def test_bytes_that_are_tokens(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(token_id) for token_id in range(17, tokenizer.vocab_size)}
    missing = {byte for byte in range(256) if bytes([byte]) not in single}
    # Bytes that UTF-8 never holds, some control characters, and the starts of planes without characters.
    assert missing == {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


def test_streamed_pieces_equal_the_whole(tokenizer: Tokenizer) -> None:
    @settings(max_examples=60)
    @given(ids=st.lists(st.integers(0, 49151), max_size=60))
    def check(ids: list[int]) -> None:
        decoder = tokenizer.incremental_decoder()
        assert "".join(map(decoder.push, ids)) + decoder.finish() == tokenizer.decode(ids)

    check()


def test_text_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    for case in GOLDEN["texts"]:
        decoded = tokenizer.decode(case["ids"], skip_special_tokens=False)
        assert decoded == case["text"]
