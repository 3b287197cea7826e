"""Each family's way to cut text into words, where the families differ."""

from __future__ import annotations

import pytest

from loadproof.tokenizer import TokenizerError
from loadproof.tokenizer.pretokenizers import word_rules

TEXT = "I'LL  pay 12345 €, ok?\n\n  Don't"


def words(name: str, text: str) -> list[str]:
    pieces = word_rules(name).build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gpt-2",
            ["I", "'", "LL", " ", " pay", " 12345", " €,", " ok", "?", "\n\n ", " Don", "'t"],
        ),
        (
            "smollm",
            [
                "I",
                "'",
                "LL",
                " ",
                " pay",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " €,",
                " ok",
                "?",
                "\n\n ",
                " Don",
                "'t",
            ],
        ),
        (
            "llama-bpe",
            ["I", "'LL", " ", " pay", " ", "123", "45", " €,", " ok", "?\n\n", " ", " Don", "'t"],
        ),
        (
            "qwen2",
            ["I", "'LL", " ", " pay", " ", "1", "2", "3", "4", "5", " €,", " ok", "?\n\n", " ", " Don", "'t"],
        ),
        (
            "tekken",
            ["I", "'LL", " ", " pay", " ", "1", "2", "3", "4", "5", " €,", " ok", "?\n\n", " ", " Don", "'t"],
        ),
        (
            "deepseek-v3",
            ["I", "'LL", " ", " pay", " ", "123", "45", " €,", " ok", "?\n\n", " ", " Don", "'t"],
        ),
    ],
)
def test_words(name: str, expected: list[str]) -> None:
    assert words(name, TEXT) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-4o", "fooBarBAZ's", ["foo", "Bar", "BAZ's"]),
        ("tekken", "fooBarBAZ", ["foo", "Bar", "BAZ"]),
        ("qwen2", "e\u0301t", ["e", "\u0301t"]),
        ("qwen35", "e\u0301t", ["e\u0301t"]),
        ("deepseek-v3", "今日は、x", ["今日は", "、", "x"]),
        # Its range for Chinese runs from U+0800, so it holds the euro sign.
        (
            "deepseek-coder",
            "I'LL 12 €, ok\n\n  a",
            ["I", "'", "LL", " ", "1", "2", " ", "€", ",", " ok", "\n", "\n", " ", " a"],
        ),
        # Its range for punctuation runs from ":" to "~", so ASCII letters part from others.
        ("deepseek-llm", "Ωέmega今日 42", ["Ωέ", "mega", "今日", " ", "4", "2"]),
    ],
)
def test_words_of_other_scripts(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


def test_composition_is_part_of_a_family() -> None:
    normalizer = word_rules("qwen2").normalizer()
    assert normalizer is not None
    assert normalizer.normalize_str("e\u0301") == "é"
    assert word_rules("llama-bpe").normalizer() is None


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'nonesuch' is not supported; known: .*smollm"):
        word_rules("nonesuch")
