"""A tokenizer rebuilt from GGUF metadata, giving the ids of the same model's ``tokenizer.json``."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders
from tokenizers.models import BPE

from loadproof.tokenizer.chat import ChatTemplates
from loadproof.tokenizer.errors import TokenizerError
from loadproof.tokenizer.library import library_errors
from loadproof.tokenizer.load import set_post_processor, templates_of
from loadproof.tokenizer.pretokenizers import word_rules
from loadproof.tokenizer.sentencepiece import as_pieces, merges_by_score, space_decoder, space_normalizer
from loadproof.tokenizer.tokenizer import SpecialTokens, Tokenizer

_PREFIX = "tokenizer.ggml."
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
# Ends of a turn that files often fail to name as such.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


class TokenType(enum.IntEnum):
    """Entries of ``tokenizer.ggml.token_type`` (GGUF specification)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True)
class _Vocabulary:
    """The vocabulary of a file, checked: ``tokens[i]``, ``types[i]`` and ``scores[i]`` belong together."""

    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        tokens = _strings(metadata, "tokens")
        if not tokens:
            raise TokenizerError(f"{_PREFIX}tokens is empty")
        types = _per_token(metadata, "token_type", len(tokens)) or [TokenType.NORMAL] * len(tokens)
        if metadata[_PREFIX + "model"] == "llama":
            tokens = as_pieces(tokens)
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
            raise TokenizerError(f"{_PREFIX}tokens has {twice!r:.100} twice")
        return cls(metadata, tokens, types, ids)

    def of_type(self, *wanted: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in wanted]

    def named_id(self, key: str) -> int | None:
        """The token id under ``tokenizer.ggml.<key>``, None where the file has none."""
        token_id = self.metadata.get(_PREFIX + key)
        if token_id is None:
            return None
        if type(token_id) is not int:
            raise TokenizerError(f"{_PREFIX}{key} is {token_id!r:.100}, not a token id")
        if not 0 <= token_id < len(self.tokens):
            raise TokenizerError(f"{_PREFIX}{key} is {token_id}, of {len(self.tokens)} tokens")
        return token_id

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(_PREFIX + key, default)
        if type(value) not in (bool, int):
            raise TokenizerError(f"{_PREFIX}{key} is {value!r:.100}, not true or false")
        return bool(value)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the metadata of a GGUF file describes.

    Reads ``tokenizer.ggml.*`` (``tokens``, ``merges`` and ``token_type`` lists of strings and integers,
    ``scores`` floats) and ``tokenizer.chat_template*``. Two models are known: ``gpt2``, byte-level BPE with
    the pre-tokenizers of :mod:`loadproof.tokenizer.pretokenizers`, and ``llama``, SentencePiece BPE.
    Raises :class:`TokenizerError` naming the key that is missing, malformed or not supported.
    """
    model = metadata.get(_PREFIX + "model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(model, str) or model not in builders:
        raise TokenizerError(f"{_PREFIX}model {model!r:.100} is not supported; known: {', '.join(builders)}")
    vocabulary = _Vocabulary.read(metadata)
    backend, add_bos = builders[model](vocabulary)
    _add_tokens(backend, vocabulary)
    special = _special_tokens(vocabulary)
    set_post_processor(
        backend,
        special.names.get("bos_token") if vocabulary.flag("add_bos_token", add_bos) else None,
        special.names.get("eos_token") if vocabulary.flag("add_eos_token", False) else None,
    )
    return Tokenizer(backend, special, ChatTemplates(_chat_templates(metadata)))


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    pre = vocabulary.metadata.get(_PREFIX + "pre", "default")
    if not isinstance(pre, str):
        raise TokenizerError(f"{_PREFIX}pre is {pre!r:.100}, not a name")
    rules = word_rules(pre)
    backend = _bpe(vocabulary.ids, _merges(vocabulary.metadata), ignore_merges=rules.whole_words)
    normalizer = rules.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    return backend, rules.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    scores = _per_token(vocabulary.metadata, "scores", len(vocabulary.tokens))
    if scores is None:
        raise TokenizerError(f"{_PREFIX}scores is missing")
    unknown = vocabulary.named_id("unknown_token_id")
    merges = merges_by_score(vocabulary.ids, _mergeable(vocabulary, scores))
    backend = _bpe(
        vocabulary.ids,
        merges,
        unk_token=vocabulary.tokens[0 if unknown is None else unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in vocabulary.types,
    )
    prefixed = vocabulary.flag("add_space_prefix", True)
    backend.normalizer = space_normalizer(prefixed)
    backend.decoder = space_decoder(prefixed)
    return backend, True


def _mergeable(vocabulary: _Vocabulary, scores: Sequence[float]) -> Iterable[tuple[str, float]]:
    """Pieces that merges may make. User-defined ones come first: SentencePiece never splits them."""
    for piece, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True):
        if kind == TokenType.NORMAL:
            yield piece, score
        elif kind == TokenType.USER_DEFINED:
            yield piece, 0.0


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = _strings(metadata, "merges")
    try:
        return [(left, right) for left, right in (line.split(" ") for line in lines)]
    except ValueError as error:
        raise TokenizerError(f"{_PREFIX}merges has a line that is not two tokens") from error


def _bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    with library_errors(f"{_PREFIX}merges do not fit the vocabulary"):
        return tokenizers.Tokenizer(BPE(vocab, merges, **options))


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    special = [AddedToken(token, normalized=False) for token in vocabulary.of_type(*_SPECIAL_TYPES)]
    defined = [AddedToken(token, normalized=False) for token in vocabulary.of_type(TokenType.USER_DEFINED)]
    with library_errors(f"{_PREFIX}tokens cannot be added"):
        backend.add_special_tokens(special)
        backend.add_tokens(defined)


def _special_tokens(vocabulary: _Vocabulary) -> SpecialTokens:
    by_default = {"bos_token": 1, "eos_token": 2} if vocabulary.metadata[_PREFIX + "model"] == "llama" else {}
    ids = {name: vocabulary.named_id(key) for name, key in _NAMED_TOKENS.items()}
    for name, token_id in by_default.items():
        if ids[name] is None and token_id < len(vocabulary.tokens):
            ids[name] = token_id
    ends = {ids["eos_token"], vocabulary.named_id("eot_token_id"), vocabulary.named_id("eom_token_id")}
    controls = {*vocabulary.of_type(TokenType.CONTROL)}
    ends |= {vocabulary.ids[token] for token in _TURN_ENDS if token in controls}
    names = {name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    known_ends = frozenset(token_id for token_id in ends if token_id is not None)
    return SpecialTokens(ids["bos_token"], ids["eos_token"], known_ends, names)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    templates = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    named = templates_of([{"name": name, "template": source} for name, source in templates.items()])
    return {**named, **templates_of(metadata.get("tokenizer.chat_template"))}


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, list) or set(map(type, values)) - {str}:
        raise TokenizerError(f"{_PREFIX}{key} is missing or not a list of strings")
    return values


def _per_token(metadata: Mapping[str, Any], key: str, count: int) -> list[Any] | None:
    values = metadata.get(_PREFIX + key)
    if values is None:
        return None
    entries = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(entries, list) or set(map(type, entries)) - {int, float}:
        raise TokenizerError(f"{_PREFIX}{key} is not a list of numbers")
    if len(entries) != count:
        raise TokenizerError(f"{_PREFIX}{key} has {len(entries)} entries for {count} tokens")
    return entries
