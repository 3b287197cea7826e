"""One local checkpoint, whatever its format: its config, its tensors, its tokenizer's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loadproof.weights.gguf import open_gguf
from loadproof.weights.gguf_config import CLASS_NAMES, config_of, generation_config_of
from loadproof.weights.gguf_source import GgufSource
from loadproof.weights.safetensors import SafetensorsSource, read_json
from loadproof.weights.tensors import RenamedSource, TensorSource, WeightsError

_COUNTS = (  # fields of a config that must be whole numbers above zero where they are present
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
)
_MAX_COUNT = 1 << 31
_TEXT_PREFIXES = {  # where multimodal checkpoints keep their text model, old layout and new
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_INHERITED = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: headers read, no weights yet.

    ``config`` is the text model's ``config.json`` (for GGUF, the one that the same model would have);
    fields that are left out have transformers' defaults. ``metadata`` is the GGUF metadata, None otherwise.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: TensorSource
    metadata: Mapping[str, Any] | None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a directory in the Hugging Face layout, or a ``.gguf`` file.

    Raises :class:`WeightsError` naming the file and its fault; no weights are read.
    """
    if path.is_dir():
        return _open_directory(path)
    file = open_gguf(path)
    try:
        config = config_of(file)
        source = GgufSource(file, config)
        generation_config = generation_config_of(file)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    return Checkpoint(path, "gguf", config, generation_config, source, file.metadata)


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        ggufs = sorted(found.name for found in path.glob("*.gguf"))
        hint = f"; name the file itself, such as {path / ggufs[0]}" if ggufs else ""
        raise WeightsError(f"{path} has no config.json{hint}")
    config = read_json(path / "config.json")
    source: TensorSource = SafetensorsSource(path)
    if "text_config" in config:
        config, source = _text_config(path, config), _text_tensors(source)
    _check_config(path / "config.json", config, len(source.shapes()))
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    return Checkpoint(path, "safetensors", config, generation_config, source, None)


def _text_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The text part of a multimodal model's config, as if it stood alone."""
    text = config["text_config"]
    if not isinstance(text, dict):
        raise WeightsError(f"{path / 'config.json'}: text_config is not an object")
    whole = {key: config[key] for key in _INHERITED if key in config} | text
    class_name = CLASS_NAMES.get(str(whole.get("model_type")))
    if class_name is not None:
        whole["architectures"] = [class_name]
    return whole


def _text_tensors(source: TensorSource) -> TensorSource:
    names = {}
    for stored in source.shapes():
        prefix = next((prefix for prefix in _TEXT_PREFIXES if stored.startswith(prefix)), None)
        if prefix is not None:
            names[_TEXT_PREFIXES[prefix] + stored.removeprefix(prefix)] = stored
    return RenamedSource(source, names) if names else source


def _check_config(path: Path, config: dict[str, Any], num_tensors: int) -> None:
    if not isinstance(config.get("model_type"), str):
        raise WeightsError(f"{path}: model_type is not a string")
    for key in _COUNTS:
        value = config.get(key)
        if value is not None and (type(value) is not int or not 0 < value < _MAX_COUNT):
            raise WeightsError(f"{path}: {key} = {value!r} is not a whole number above zero")
    layers = config.get("num_hidden_layers")
    if layers is not None and layers > num_tensors:
        raise WeightsError(f"{path}: {layers} layers cannot be made of {num_tensors} tensors")
