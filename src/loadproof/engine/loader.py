"""From a model's name to a device and a tokenizer ready to serve."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadproof.config import EngineConfig
from loadproof.engine.memory import available_memory
from loadproof.engine.recommended import recommended_sampling
from loadproof.engine.sampling_params import SamplingParams
from loadproof.weights.tensors import WeightsError

if TYPE_CHECKING:
    from pathlib import Path

    from loadproof.devices.device import Device
    from loadproof.tokenizer.tokenizer import Tokenizer
    from loadproof.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory; whoever holds it closes the device."""

    name: str
    device: Device
    tokenizer: Tokenizer
    generation_config: Mapping[str, Any]  # what the model recommends, {} if it says nothing


def load_model(config: EngineConfig) -> LoadedModel:
    """Find, check and load the model that ``config`` names.

    Raises a ``ValueError`` subclass that says what is wrong with the name, the files or the settings.
    """
    from loadproof.devices.cpu import CpuDevice
    from loadproof.models import build_graph
    from loadproof.weights.checkpoint import open_checkpoint
    from loadproof.weights.resolve import resolve_model
    from loadproof.weights.tensors import check_params

    checkpoint = open_checkpoint(resolve_model(config.model))
    with _naming(checkpoint.path):
        graph = build_graph(checkpoint.config, _config_name(checkpoint))
        check_params(checkpoint.tensors, graph.params.values())
    _check_recommended(checkpoint)
    limits = config.limits(graph, available_memory())
    # The tokenizer is built while the device packs weights outside the interpreter lock.
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(_tokenizer, checkpoint)
        with _naming(checkpoint.path, WeightsError):
            device = CpuDevice(graph, checkpoint.tensors, limits, num_threads=config.num_threads)
        try:
            return LoadedModel(
                config.served_model_name or config.model,
                device,
                tokenizer.result(),
                checkpoint.generation_config,
            )
        except BaseException:
            device.close()
            raise


@contextmanager
def _naming(path: Path, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Have errors of a ``kind`` say which checkpoint they are about, where they don't yet."""
    try:
        yield
    except kind as error:
        if not re.search(rf"(?<!\S){re.escape(str(path))}(?=[/:]|$)", str(error)):
            error.args = (f"{path}: {error}",)
        raise


def _config_name(checkpoint: Checkpoint) -> str:
    path = checkpoint.path
    return str(path if checkpoint.metadata is not None else path / "config.json")


def _check_recommended(checkpoint: Checkpoint) -> None:
    try:
        SamplingParams(**recommended_sampling(checkpoint.generation_config))
    except ValueError as error:
        path = checkpoint.path
        where = path if checkpoint.metadata is not None else path / "generation_config.json"
        raise WeightsError(f"{where}: {error}") from error


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    from loadproof.tokenizer import load_tokenizer, tokenizer_from_gguf

    with _naming(checkpoint.path):
        if checkpoint.metadata is not None:
            return tokenizer_from_gguf(checkpoint.metadata)
        return load_tokenizer(checkpoint.path, checkpoint.config, checkpoint.generation_config)
