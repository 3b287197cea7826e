"""How byte-level vocabularies cut text into words, by the names that GGUF files use (``tokenizer.ggml.pre``).

The patterns are those of the models' own ``tokenizer.json`` files: with another pattern the ids of a model
are wrong in places, so an unknown name is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from loadproof.tokenizer.errors import TokenizerError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKED_SYMBOLS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")

_LLAMA3 = "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _SYMBOLS, _SPACES))
_QWEN2 = "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}", _SYMBOLS, _SPACES))
_QWEN35 = "|".join((_CONTRACTIONS, _MARKED_LETTERS, r"\p{N}", _MARKED_SYMBOLS, _SPACES))
_TEKKEN = "|".join((*_CASED, r"\p{N}", _SYMBOLS_SLASH, _SPACES))
_GPT4O = "|".join((*(f"{cased}{_CONTRACTIONS}?" for cased in _CASED), r"\p{N}{1,3}", _SYMBOLS_SLASH, _SPACES))
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}""",
)
# Letters with case, as Unicode had them when the model was trained. Code points, not characters: some of
# these are canonically equivalent to others, and an editor that composes text would change the ranges.
_DEEPSEEK_CASED = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯ\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}"
    r"\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}"
    r"\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}"
    r"\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}"
    r"\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}"
    r"\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}"
    r"\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}"
    r"\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}"
    r"\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}"
    r"\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}"
    r"\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+")


@dataclass(frozen=True)
class WordRules:
    """How one family of byte-level tokenizers prepares text for its merges."""

    build: Callable[[], PreTokenizer]
    compose: bool = False  # text is put into Unicode normal form C first
    whole_words: bool = False  # a word that is in the vocabulary is not merged up to (``ignore_merges``)
    add_bos: bool = False  # what a file without ``tokenizer.ggml.add_bos_token`` means

    def normalizer(self) -> Normalizer | None:
        """The library's normalizer, where there is one."""
        return normalizers.NFC() if self.compose else None


def _words() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_and_words() -> PreTokenizer:
    return pre_tokenizers.Sequence([Digits(individual_digits=True), _words()])


def _splits(*patterns: str, digits: bool = False) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        steps: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
        if digits:
            steps.append(Digits(individual_digits=True))
        return pre_tokenizers.Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_GPT2_RULES = WordRules(_words)
_COMPOSED_GPT2_RULES = WordRules(_words, compose=True)
_DIGITS_RULES = WordRules(_digits_and_words)
_LLAMA3_RULES = WordRules(_splits(_LLAMA3), whole_words=True, add_bos=True)
_GPT4O_RULES = WordRules(_splits(_GPT4O))
_RULES = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "exaone4", "granite-docling"), _GPT2_RULES),
    **dict.fromkeys(("mpt", "olmo"), _COMPOSED_GPT2_RULES),
    **dict.fromkeys(("smollm", "smollm2", "starcoder", "refact", "command-r"), _DIGITS_RULES),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA3_RULES),
    "qwen2": WordRules(_splits(_QWEN2), compose=True),
    "deepseek-r1-qwen": WordRules(_splits(_QWEN2)),
    "qwen35": WordRules(_splits(_QWEN35)),
    "tekken": WordRules(_splits(_TEKKEN), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O_RULES),
    "deepseek-llm": WordRules(_splits(*_DEEPSEEK_LLM, digits=True)),
    "deepseek-coder": WordRules(_splits(*_DEEPSEEK_CODER, digits=True)),
    "deepseek-v3": WordRules(_splits(*_DEEPSEEK3)),
}


def word_rules(name: str) -> WordRules:
    """The rules of that name. Raises :class:`TokenizerError` for one that is not known."""
    if name not in _RULES:
        known = ", ".join(sorted(_RULES))
        raise TokenizerError(f"the pre-tokenizer {name!r:.100} is not supported; known: {known}")
    return _RULES[name]
