"""A tiny model in which two tokens overflow: their embeddings are not a number, and infinite."""

from __future__ import annotations

import numpy as np
from tests.tiny_models import BF16, TinyModel

from loadproof.graph import Embed, Graph


class PoisonedSource:
    """Tensors of a tiny model; ``nan`` and ``inf``, its last two tokens, spoil a sequence that holds them.

    Where the table is tied, these tokens' logits are spoilt for all; ``clean`` counts the others.
    """

    def __init__(self, model: TinyModel) -> None:
        embed = model.graph.ops[0]
        assert isinstance(embed, Embed)
        self._model = model
        self._table = embed.weight.name
        self.graph: Graph = model.graph
        self.clean = model.graph.vocab_size - 2
        self.nan, self.inf = self.clean, self.clean + 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._model.source.shapes()

    def read(self, name: str) -> BF16:
        tensor = self._model.source.read(name)
        if name == self._table:
            tensor = tensor.copy()
            tensor[self.nan] = np.nan
            tensor[self.inf] = np.inf
        return tensor

    def read_bf16(self, name: str) -> BF16:
        return self.read(name)

    def digest(self) -> str:
        return self._model.source.digest() + "poisoned"

    def sequence(self, length: int, seed: int) -> list[int]:
        """Random clean tokens."""
        tokens: list[int] = np.random.default_rng(seed).integers(0, self.clean, length).tolist()
        return tokens

    def num_clean(self, tokens: list[int]) -> int:
        """How many positions come before the first spoilt one."""
        return next((at for at, token in enumerate(tokens) if token >= self.clean), len(tokens))
