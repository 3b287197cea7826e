"""The engine's only view of a tokenizer, whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from loadproof.models.config import MAX_VOCAB
from loadproof.tokenizer.chat import ChatTemplates
from loadproof.tokenizer.errors import TokenizerError
from loadproof.tokenizer.incremental import IncrementalDecoder, decode_all
from loadproof.tokenizer.library import library_errors
from loadproof.tokenizer.pieces import TokenBytes

_PROBE = "A text, 1st of 2.\n"


@dataclass(frozen=True)
class SpecialTokens:
    """Which tokens begin and end texts, and the named tokens that chat templates may write."""

    bos_id: int | None = None
    eos_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()  # any of these ends an answer
    names: Mapping[str, str] = field(default_factory=dict)  # e.g. {"bos_token": "<s>"}


class Tokenizer:
    """Text to token ids and back, and chats to prompts.

    Text is defined by bytes (``loadproof.tokenizer.pieces``): :meth:`decode` of a sequence equals the joined
    pieces of :class:`IncrementalDecoder`. No clean-up of spaces is ever done: text is what the model wrote.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens, templates: ChatTemplates):
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab_size(), *(token_id + 1 for token_id in added), 0)
        if self.vocab_size > MAX_VOCAB:
            raise TokenizerError(
                f"the tokenizer has ids up to {self.vocab_size - 1}; at most {MAX_VOCAB} are read"
            )
        for token_id in (special.bos_id, special.eos_id, *special.eos_token_ids):
            if token_id is not None and token_id < 0:
                raise TokenizerError(f"a special token has the id {token_id}")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = special
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._templates = templates
        self._bytes = TokenBytes(backend)
        # A panic is the file's fault, and shows only here; an error is its text's, which may have no token.
        with library_errors("the tokenizer fails"), suppress(Exception):
            backend.encode(_PROBE)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where the model has one."""
        return self._special.bos_id

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end-of-text token; see :attr:`eos_token_ids` for all that end an answer."""
        return self._special.eos_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: end of text, of turn, of message."""
        return self._special.eos_token_ids

    @property
    def strip_spaces(self) -> int:
        """How many spaces are dropped at the start of a text (SentencePiece writes one there)."""
        return self._bytes.rules.strip_spaces

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`apply_chat_template` can work."""
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ``add_special_tokens`` adds what the model expects around it (BOS).

        Special tokens written in the text become those tokens. Raises ``ValueError`` for text that is not
        Unicode (lone surrogates), and where the tokenizer fails.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """:meth:`encode` of each text, on several threads."""
        for text in texts:
            _check_unicode(text)
        with library_errors("the tokenizer fails"):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(
        self, token_ids: Iterable[int], skip_special_tokens: bool = True, *, continuation: bool = False
    ) -> str:
        """Text of a sequence of tokens; ``continuation`` as for :class:`IncrementalDecoder`.

        Ids that name no token add nothing; raises ``ValueError`` for a negative id.
        """
        return decode_all(self, token_ids, skip_special_tokens=skip_special_tokens, continuation=continuation)

    def incremental_decoder(
        self, *, skip_special_tokens: bool = True, continuation: bool = False
    ) -> IncrementalDecoder:
        """A decoder for one growing sequence of tokens."""
        return IncrementalDecoder(self, skip_special_tokens=skip_special_tokens, continuation=continuation)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, a special token's own text included."""
        return self._bytes[token_id]

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, or None for an id that names no token."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup (begin, end, role, ...) rather than text."""
        return token_id in self._special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a chat, by the model's own template; ``variables`` are handed to it.

        ``continue_final_message`` leaves the last message open for the model to go on with. Raises
        :class:`ChatTemplateError` for malformed messages, for a model without a template, and when the
        template refuses or fails.
        """
        return self._templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self._special.names, **variables},
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of :meth:`apply_chat_template`. Templates write their own BOS, so none is added."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)


def _check_unicode(text: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"a text is a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate at position {error.start}") from error
