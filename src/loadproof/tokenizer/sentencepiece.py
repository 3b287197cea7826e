"""SentencePiece BPE vocabularies (pieces with scores) as a model of the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter

from tokenizers import decoders, normalizers
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer

_SPACE = "▁"
_TAB_BYTE = "<0x09>"
_score = itemgetter(1)


def as_pieces(tokens: Sequence[str]) -> list[str]:
    """The vocabulary as ``tokenizer.json`` files write it: GGUF files differ in two places.

    Their user-defined tokens may hold plain spaces. And where the tab has only its byte token but pieces are
    made of tabs (Gemma), that token takes the tab's place, so that merges can start from it.
    """
    pieces = [token.replace(" ", _SPACE) if " " in token else token for token in tokens]
    known = {"\t", "\t\t", _TAB_BYTE}.intersection(pieces)
    if known == {"\t\t", _TAB_BYTE}:
        pieces[pieces.index(_TAB_BYTE)] = "\t"
    return pieces


def merges_by_score(vocab: Mapping[str, int], pieces: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Merge rules, best first, that do what joining the pair with the best score does.

    ``pieces`` are the pieces that may be made, each with its score. Every way to make a piece of two others
    is a rule; rules are ordered by the piece's score, then by the length of the left and of the right part,
    all descending, then by their ids: the order of ``tokenizer.json`` files converted from SentencePiece
    models, which decides between two ways to make the same piece.
    """
    lengths = {len(token) for token in vocab}

    @cache
    def cuts(length: int) -> list[int]:
        # Only where both parts may be tokens by their lengths: trying all would be quadratic in a long piece.
        return [cut for cut in range(length - 1, 0, -1) if cut in lengths and length - cut in lengths]

    rules: list[tuple[str, str]] = []
    for _, equals in groupby(sorted(pieces, key=_score, reverse=True), key=_score):
        start, tied = len(rules), list(equals)
        for piece, _ in tied:
            rules += [
                (left, right)
                for cut in cuts(len(piece))
                if (right := piece[cut:]) in vocab and (left := piece[:cut]) in vocab
            ]
        if len(tied) > 1:  # one piece's rules are in order already
            rules[start:] = sorted(
                rules[start:], key=lambda rule: (-len(rule[0]), -len(rule[1]), vocab[rule[0]], vocab[rule[1]])
            )
    return rules


def space_normalizer(add_space_prefix: bool) -> Normalizer:
    """Spaces become pieces' own mark, with one put before each text where the model was trained so."""
    replaced = normalizers.Replace(" ", _SPACE)
    if not add_space_prefix:
        return replaced
    return normalizers.Sequence([normalizers.Prepend(_SPACE), replaced])


def space_decoder(strip_space: bool) -> Decoder:
    """Pieces to text: the way back of :func:`space_normalizer`, with byte tokens read as bytes."""
    steps: list[Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip_space:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
