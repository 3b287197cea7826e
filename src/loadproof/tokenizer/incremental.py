"""Text of a growing sequence of tokens, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenTable(Protocol):
    """What decoding needs to know of a tokenizer."""

    @property
    def strip_spaces(self) -> int:
        """How many spaces are dropped at the start of a text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup (end of turn, ...) rather than text."""


_new_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Decodes token by token; the joined pieces equal the decoding of the whole, for every sequence of ids.

    A piece is final: no later token changes it. Only the up to three bytes of a character that may still be
    completed are held back, so a token costs the bytes it adds and no more. Invalid bytes become U+FFFD, one
    for each maximal part of a valid sequence (Unicode 15, section 3.9, U+FFFD substitution).

    With ``continuation`` the text follows other text (a completion of a prompt): SentencePiece tokenizers
    then keep the space at its start, which they drop at the start of a text of its own.
    """

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True, continuation: bool = False):
        self._table = table
        self._skip_special = skip_special_tokens
        self._spaces_to_strip = 0 if continuation else table.strip_spaces
        self._utf8 = _new_utf8("replace")

    def push(self, token_id: int) -> str:
        """Add one token and return the text that became final, often empty.

        Raises ``ValueError`` for a negative id; an id that names no token adds nothing.
        """
        data = self._table.token_bytes(token_id)
        if self._skip_special and self._table.is_special(token_id):
            return ""
        if self._spaces_to_strip and data:
            data = self._strip(data)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """End the text: what was held back, U+FFFD for a character left incomplete."""
        return self._utf8.decode(b"", True)

    def _strip(self, data: bytes) -> bytes:
        kept = data.lstrip(b" ")
        spaces = len(data) - len(kept)
        stripped = min(spaces, self._spaces_to_strip)
        self._spaces_to_strip = 0 if kept else self._spaces_to_strip - stripped
        return data[stripped:]


def decode_all(
    table: TokenTable,
    token_ids: Iterable[int],
    *,
    skip_special_tokens: bool = True,
    continuation: bool = False,
) -> str:
    """The text of a whole sequence: the definition that :class:`IncrementalDecoder` streams."""
    parts = []
    for token_id in token_ids:
        data = table.token_bytes(token_id)
        if not (skip_special_tokens and table.is_special(token_id)):
            parts.append(data)
    data = b"".join(parts)
    strip = 0 if continuation else table.strip_spaces
    spaces = len(data) - len(data.lstrip(b" "))
    return data[min(spaces, strip) :].decode("utf-8", "replace")
