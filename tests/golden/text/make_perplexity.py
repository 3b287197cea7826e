"""Write ``nll.npz``: how surprised the float32 oracle is by each token of ``text.txt``, with the real model.

``nll`` is that of the oracle, ``rounded_nll`` that of the oracle with its products' inputs rounded to bf16
(``tests/rounding.py``): how far any engine is from it that computes in bf16.

Needs nothing but the package; takes some minutes and 2 GB. Run from the repository:

    PYTHONPATH=src:. python tests/golden/text/make_perplexity.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.rounding import rounding

from loadproof.devices.reference import F32, ReferenceDevice
from loadproof.models import build_graph
from loadproof.tokenizer import load_tokenizer, tokenizer_from_gguf
from loadproof.tokenizer.tokenizer import Tokenizer
from loadproof.weights.checkpoint import Checkpoint, open_checkpoint
from loadproof.weights.resolve import resolve_model

DIRECTORY = Path(__file__).parent


def text() -> str:
    return (DIRECTORY / "text.txt").read_text()


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.metadata is not None:
        return tokenizer_from_gguf(checkpoint.metadata)
    return load_tokenizer(checkpoint.path, checkpoint.config, checkpoint.generation_config)


def surprise(logits: F32, next_tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Negative log-likelihood ``[T]`` in nats of each next token under ``logits`` ``[T, vocab_size]``."""
    found = np.empty(len(logits))
    for row, (these, token) in enumerate(zip(logits, next_tokens.tolist(), strict=True)):
        exact = these.astype(np.float64)
        found[row] = exact.max() + np.log(np.exp(exact - exact.max()).sum()) - exact[token]
    return found


def main() -> None:
    checkpoint = open_checkpoint(resolve_model("smollm2-135m"))
    tokens = np.array(tokenizer_of(checkpoint).encode(text(), add_special_tokens=False), np.int32)
    oracle = ReferenceDevice(build_graph(checkpoint.config), checkpoint.tensors)
    found = surprise(oracle.forward(tokens[:-1]), tokens[1:])
    with rounding():
        rounded = surprise(oracle.forward(tokens[:-1]), tokens[1:])
    np.savez_compressed(
        DIRECTORY / "nll.npz",
        tokens=tokens,
        nll=found.astype(np.float32),
        rounded_nll=rounded.astype(np.float32),
    )
    print(f"{len(tokens)} tokens, perplexity {np.exp(found.mean()):.4f}")


if __name__ == "__main__":
    main()
