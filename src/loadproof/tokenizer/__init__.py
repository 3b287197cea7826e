"""Text to token ids and back: one interface over every tokenizer file that models come with."""

from loadproof.tokenizer.errors import ChatTemplateError, TokenizerError
from loadproof.tokenizer.gguf import tokenizer_from_gguf
from loadproof.tokenizer.incremental import IncrementalDecoder
from loadproof.tokenizer.load import load_tokenizer
from loadproof.tokenizer.stop import StopChecker
from loadproof.tokenizer.tokenizer import SpecialTokens, Tokenizer

__all__ = [
    "ChatTemplateError",
    "IncrementalDecoder",
    "SpecialTokens",
    "StopChecker",
    "Tokenizer",
    "TokenizerError",
    "load_tokenizer",
    "tokenizer_from_gguf",
]
