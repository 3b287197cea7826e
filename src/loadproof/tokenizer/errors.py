"""What the tokenizer refuses, and why it says so."""

from __future__ import annotations


class TokenizerError(ValueError):
    """Tokenizer files or metadata that cannot be used as they are: missing, malformed or not supported."""


class ChatTemplateError(ValueError):
    """Messages or a chat template that do not make a prompt; the message says which part and why."""
