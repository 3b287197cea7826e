"""The bytes each token stands for: what every decoding in this package is made of.

A decoder of the ``tokenizers`` library is a chain of rules over token strings. For the decoders that language
models use, the chain is equal to writing each token's bytes one after the other, dropping leading spaces of
the whole, and reading the result as UTF-8 with U+FFFD for what is not. Defined so, decoding can be streamed
exactly. Where the library differs, it is for text that no valid encoding gives: it replaces *every* byte of
an invalid run of byte-fallback tokens, and reads an added token's text through the byte alphabet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from loadproof.models.config import MAX_VOCAB
from loadproof.tokenizer.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte, all 256 (GPT-2's ``encoder.py``).

    Printable Latin-1 bytes stand for themselves; the others take U+0100 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True)
class DecodeRules:
    """A decoder, reduced to how token strings become bytes."""

    byte_level: bool = False  # characters of the byte alphabet are bytes
    byte_fallback: bool = False  # tokens such as <0x0A> are one byte
    replacements: tuple[tuple[str, str], ...] = ()  # in token strings, in order
    strip_spaces: int = 0  # at most so many spaces are dropped at the start of a text

    @classmethod
    def from_decoder(cls, state: Mapping[str, Any] | None) -> DecodeRules:
        """Read the library's decoder description (``decoder`` of a ``tokenizer.json``).

        Raises :class:`TokenizerError` for a decoder that is not a rule over tokens as described above.
        """
        rules, fused = cls(), False
        for step in _steps(state):
            fused = fused or step.get("type") == "Fuse"
            rules = _with_step(rules, step, fused)
        return rules


def _steps(state: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if state is None:
        raise TokenizerError("the tokenizer has no decoder: token strings cannot be joined to text")
    if state.get("type") != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _steps(inner)]


def _with_step(rules: DecodeRules, step: Mapping[str, Any], fused: bool) -> DecodeRules:
    match step:
        case {"type": "ByteLevel"}:
            return replace(rules, byte_level=True)
        case {"type": "ByteFallback"}:
            return replace(rules, byte_fallback=True)
        case {"type": "Fuse"}:
            return rules
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return replace(rules, replacements=(*rules.replacements, (old, new)))
        case {"type": "Strip", "content": " ", "start": int(count), "stop": 0} if fused:
            return replace(rules, strip_spaces=rules.strip_spaces + count)
        case {"type": "Metaspace", "replacement": str(mark)}:
            stripped = 0 if step.get("prepend_scheme", "always") == "never" else 1
            return replace(rules, replacements=(*rules.replacements, (mark, " ")), strip_spaces=stripped)
    raise TokenizerError(f"this decoder is not supported: {json.dumps(step, ensure_ascii=False)[:200]}")


class TokenBytes:
    """Token id -> bytes of one tokenizer, each worked out when first asked for."""

    def __init__(self, backend: tokenizers.Tokenizer):
        decoder = backend.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self.rules = DecodeRules.from_decoder(state)
        self._backend = backend
        self._alphabet = byte_alphabet()
        self._added = {
            token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}  # by id, of tokens that there are: ids may be far apart

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that names no token (rows that pad an embedding).

        Raises ``ValueError`` for a negative id.
        """
        if token_id < 0:
            raise ValueError(f"a token id is not negative: {token_id}")
        known = self._known.get(token_id)
        if known is not None:
            return known
        token = self._backend.id_to_token(token_id) if token_id < MAX_VOCAB else None
        if token is None:
            return b""
        self._known[token_id] = self._work_out(token_id, token)
        return self._known[token_id]

    def _work_out(self, token_id: int, token: str) -> bytes:
        if self.rules.byte_level:
            return self._from_alphabet(token_id, token)
        byte = _BYTE_TOKEN.fullmatch(token) if self.rules.byte_fallback else None
        if byte:
            return bytes.fromhex(byte[1])
        for old, new in self.rules.replacements:
            token = token.replace(old, new)
        return token.encode()

    def _from_alphabet(self, token_id: int, token: str) -> bytes:
        if token_id in self._added:
            return token.encode()
        try:
            return bytes(self._alphabet[char] for char in token)
        except KeyError:  # not a byte-level token: the library takes its text as it stands
            return token.encode()
