"""Incremental decoding: joined pieces equal the whole, and nothing that was emitted changes later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from loadproof.tokenizer import IncrementalDecoder, Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "tokenizer"
TOKENIZERS = {family: load_tokenizer(GOLDEN / family) for family in ("llama3", "llama2", "gemma")}
BACKENDS = {
    family: tokenizers.Tokenizer.from_file(str(GOLDEN / family / "tokenizer.json")) for family in TOKENIZERS
}
# Tiny vocabularies of at most 600 tokens; ids beyond them name no token. Low ids are bytes in each of them.
ID_LISTS = st.lists(st.one_of(st.integers(0, 270), st.integers(0, 700)), max_size=40)
families = pytest.mark.parametrize("family", TOKENIZERS)


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as one token a byte: every character is split across tokens."""
    by_bytes = {
        tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(tokenizer.vocab_size))
    }
    return [by_bytes[bytes([byte])] for byte in text.encode()]


# One incomplete character at most; the first two bytes of a surrogate's three would never make one.
HELD = ("", "\ufffd", "\ufffd\ufffd")


@families
@given(ids=ID_LISTS, skip=st.booleans(), continuation=st.booleans())
@example(ids=[169, 94], skip=False, continuation=False)
def test_joined_pieces_equal_the_whole(family: str, ids: list[int], skip: bool, continuation: bool) -> None:
    tokenizer = TOKENIZERS[family]
    decoder = tokenizer.incremental_decoder(skip_special_tokens=skip, continuation=continuation)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += decoder.push(token_id)
        whole = tokenizer.decode(ids[:count], skip, continuation=continuation)
        assert whole.startswith(shown)
        assert whole.removeprefix(shown) in HELD
    rest = decoder.finish()
    assert rest in HELD
    assert shown + rest == tokenizer.decode(ids, skip, continuation=continuation)


@families
@given(ids=ID_LISTS, more=ID_LISTS)
def test_what_was_emitted_never_changes(family: str, ids: list[int], more: list[int]) -> None:
    tokenizer = TOKENIZERS[family]
    decoder = IncrementalDecoder(tokenizer)
    shown = "".join(decoder.push(token_id) for token_id in ids)
    assert tokenizer.decode(ids + more).startswith(shown)


@given(ids=st.lists(st.integers(0, 426), max_size=40), skip=st.booleans())
@example(ids=[], skip=True)
def test_byte_level_text_is_the_librarys_for_every_sequence(ids: list[int], skip: bool) -> None:
    expected = BACKENDS["llama3"].decode(ids, skip_special_tokens=skip)
    assert TOKENIZERS["llama3"].decode(ids, skip) == expected


@families
@given(text=st.text())
def test_text_is_the_librarys_for_what_text_encodes_to(family: str, text: str) -> None:
    ids = TOKENIZERS[family].encode(text)
    for skip in (True, False):
        assert TOKENIZERS[family].decode(ids, skip) == BACKENDS[family].decode(ids, skip_special_tokens=skip)


@families
@pytest.mark.parametrize("text", ["é", "今", "👩‍👩‍👧‍👦", "🇫🇷", "e\u0301", "\ufffd", "a\u200db"])
def test_a_character_appears_with_its_last_byte(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    decoder = tokenizer.incremental_decoder()
    pieces = [decoder.push(token_id) for token_id in byte_ids(tokenizer, text)]
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[-1]
    assert decoder.finish() == ""


@families
def test_an_incomplete_character_ends_as_one_replacement(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    decoder = tokenizer.incremental_decoder()
    ids = byte_ids(tokenizer, "a👍")[:-1]
    assert "".join(map(decoder.push, ids)) == "a"
    assert decoder.finish() == "\ufffd"
    assert tokenizer.decode(ids) == "a\ufffd"


def test_a_sentencepiece_text_loses_its_first_space_but_a_continuation_keeps_it() -> None:
    tokenizer = TOKENIZERS["llama2"]
    ids = tokenizer.encode("  the the")
    assert tokenizer.decode(ids) == "  the the"
    assert tokenizer.decode(ids, continuation=True) == "   the the"
    decoder = tokenizer.incremental_decoder()
    assert "".join(map(decoder.push, ids)) == "  the the"
    assert TOKENIZERS["gemma"].decode(TOKENIZERS["gemma"].encode(" the")) == " the"


@families
def test_ids_without_a_token_add_nothing_and_negative_ones_are_refused(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    decoder = tokenizer.incremental_decoder()
    assert decoder.push(10**6) == ""
    assert tokenizer.decode([10**12]) == ""
    assert tokenizer.id_to_token(10**6) is None
    with pytest.raises(ValueError, match="not negative: -1"):
        decoder.push(-1)
    with pytest.raises(ValueError, match="not negative: -7"):
        tokenizer.decode([-7])


def test_added_tokens_are_text_even_where_it_looks_like_the_byte_alphabet(tmp_path: Path) -> None:
    description = json.loads((GOLDEN / "llama3" / "tokenizer.json").read_text(encoding="utf-8"))
    entry = {"id": 426, "content": "é Ġ", "special": False, "normalized": False}
    description["added_tokens"].append({**entry, "single_word": False, "lstrip": False, "rstrip": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("aé Ġb")) == "aé Ġb"
