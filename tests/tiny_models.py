"""Small random models with golden answers from transformers, made again from nothing but their configs.

The weights are drawn from the tensors' names, so none are stored; all are bfloat16 numbers, so a float32 and
a bfloat16 device hold the same model. ``golden/make_models.py`` wrote the goldens, with these weights in
transformers' own models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from loadproof.graph import Embed, Graph, Linear, Logits, RmsNorm
from loadproof.models import build_graph

BF16 = npt.NDArray[ml_dtypes.bfloat16]
F32 = npt.NDArray[np.float32]

GOLDEN = Path(__file__).parent / "golden" / "models"


@dataclass(frozen=True)
class Case:
    """A prompt and transformers' float32 answer to it."""

    prompt: list[int]
    logits: F32  # [len(prompt), vocab_size]
    greedy: list[int]  # continuation of the prompt


class TinySource:
    """Random tensors of a graph, as a :class:`~loadproof.weights.tensors.TensorSource`.

    The draws are uniform, from the bits of NumPy's Philox alone, and scaled so that every part of the model
    moves the logits, whose standard deviation is about 3.
    """

    def __init__(self, graph: Graph, seed: str) -> None:
        self._seed = seed
        self._params = graph.params
        self._scales = _scales(graph)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: param.shape for name, param in self._params.items()}

    def read(self, name: str) -> BF16:
        mean, deviation = self._scales[name]
        shape = self._params[name].shape
        values = mean + deviation * _uniform(f"{self._seed}/{name}", shape)
        # By way of float32, as the goldens' weights were: releases of ml_dtypes round float64 differently.
        return values.astype(np.float32).astype(ml_dtypes.bfloat16)

    def read_bf16(self, name: str) -> BF16:
        return self.read(name)

    def digest(self) -> str:
        parts = hashlib.sha256()
        for name in sorted(self._params):
            parts.update(f"{name} {self._params[name].shape}".encode() + self.read(name).tobytes())
        return parts.hexdigest()


@dataclass(frozen=True)
class TinyModel:
    """One model: its config and all that follows from it."""

    name: str

    @property
    def directory(self) -> Path:
        return GOLDEN / self.name

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        return config

    @cached_property
    def graph(self) -> Graph:
        return build_graph(self.config)

    @cached_property
    def source(self) -> TinySource:
        return TinySource(self.graph, self.name)

    @cached_property
    def golden(self) -> list[Case]:
        with np.load(self.directory / "golden.npz", allow_pickle=False) as stored:
            count = sum(key.startswith("prompt") for key in stored.files)
            return [
                Case(
                    stored[f"prompt{i}"].tolist(),
                    stored[f"logits{i}"].astype(np.float32),
                    stored[f"greedy{i}"].tolist(),
                )
                for i in range(count)
            ]


TINY: dict[str, TinyModel] = {
    path.parent.name: TinyModel(path.parent.name) for path in sorted(GOLDEN.glob("*/config.json"))
}


def write_model(directory: Path, name: str) -> Path:
    """Write a model as users have it, in Hugging Face's layout, into ``directory`` and return that.

    The tokenizer is byte-level BPE with a few merges: id 0 begins a text, id 1 ends one, 2 to 257 are bytes.
    """
    model = TINY[name]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    _write_safetensors(
        directory / "model.safetensors", {key: model.source.read(key) for key in model.source.shapes()}
    )
    _write_tokenizer(directory, model.graph.vocab_size)
    return directory


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [(a, b) for a in "etaoin" for b in "etaoinshrdlu" if a != b][: vocab_size - len(alphabet)]
    pieces = alphabet + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in alphabet[:2]])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template + "assistant:",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _uniform(key: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Uniform numbers of mean 0 and deviation 1 that depend on nothing but ``key`` and their place."""
    philox = np.random.Philox(key=int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little"))
    bits = np.asarray(philox.random_raw(int(np.prod(shape))), np.uint64) >> np.uint64(40)
    uniform: npt.NDArray[np.float64] = (bits.astype(np.float64) / 2**24 - 0.5) * 12**0.5
    return uniform.reshape(shape)


def _scales(graph: Graph) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each tensor, by the op that reads it.

    The embedding is a small part of the residual stream, else a model with a tied output matrix would
    repeat its last token; its last norm makes up for the small matrix.
    """
    scales: dict[str, tuple[float, float]] = {}
    for op in graph.ops:
        if isinstance(op, Embed):
            scales[op.weight.name] = (0.0, 0.4 / op.scale)
        elif isinstance(op, Linear):
            scales[op.weight.name] = (0.0, 1.5 / op.x.width**0.5)
            if op.bias is not None:
                scales[op.bias.name] = (0.0, 0.5)
        elif isinstance(op, RmsNorm):
            scales[op.weight.name] = (1.0 - op.offset, 0.25)
        elif isinstance(op, Logits):
            _, head = scales.setdefault(op.weight.name, (0.0, 3.0 / op.x.width**0.5))
            gain = 3.0 / (head * op.x.width**0.5)
            last = graph.ops[op.x.index]
            assert isinstance(last, RmsNorm)
            scales[last.weight.name] = (gain - last.offset, 0.25 * gain)
    return scales


def _write_safetensors(path: Path, tensors: Mapping[str, BF16]) -> None:
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
