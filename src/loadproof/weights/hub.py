"""Models on the Hugging Face hub: ``org/name``, ``org/name@revision``, ``org/name:FILE.gguf``.

Only files that a model is read from are fetched, never code; huggingface_hub keeps its own cache
(``HF_HOME``), and ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` count as they do everywhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadproof.weights.fetch import OFFLINE_HINT, ModelNotFoundError

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>\w[\w./-]*))?"
    r"(:(?P<file>\w[\w./ -]*\.gguf))?",
    re.ASCII,
)
_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
]


@dataclass(frozen=True)
class HubId:
    """A repository on the hub, where given at one revision, where given one GGUF file of it."""

    repo: str
    revision: str | None
    file: str | None


def parse_hub_id(name: str) -> HubId | None:
    """Read a hub id; None where ``name`` doesn't have the form of one."""
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name or "--" in match["repo"]:
        return None
    return HubId(match["repo"], match["revision"], match["file"])


def fetch_from_hub(hub_id: HubId, *, progress: bool) -> Path:
    """The local directory of the model, or its GGUF file, downloaded where it isn't in the hub's cache.

    Raises :class:`ModelNotFoundError` where the hub has no such thing or can't be reached.
    """
    import huggingface_hub

    patterns = _FILES if hub_id.file is None else [hub_id.file]
    try:
        with _bars(progress):
            folder = huggingface_hub.snapshot_download(
                hub_id.repo, revision=hub_id.revision, allow_patterns=patterns
            )
    except Exception as error:  # the network layers below have no common base class
        raise ModelNotFoundError(_unreachable(hub_id, error)) from error
    return _usable(hub_id, Path(str(folder)))


def _usable(hub_id: HubId, folder: Path) -> Path:
    wanted = folder / (hub_id.file or "config.json")
    if wanted.is_file():
        return folder if hub_id.file is None else wanted
    where = f"{hub_id.repo} on the Hugging Face hub"
    if hub_id.file is not None:
        raise ModelNotFoundError(f"{where} has no file {hub_id.file}")
    raise ModelNotFoundError(
        f"{where} has no config.json (in what was fetched to {folder}); for a repository of GGUF files name "
        f"the file: {hub_id.repo}:FILE.gguf"
    )


@contextmanager
def _bars(progress: bool) -> Iterator[None]:
    """Silence the hub's progress bars unless they are wanted and standard error is a terminal."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    chosen_by_user = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    if (
        chosen_by_user
        or are_progress_bars_disabled()
        or (progress and sys.stderr is not None and sys.stderr.isatty())
    ):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _unreachable(hub_id: HubId, error: Exception) -> str:
    at = "" if hub_id.revision is None else f" at revision {hub_id.revision}"
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return (
        f"{hub_id.repo}{at} could not be had from the Hugging Face hub, nor from its local cache: {reason}. "
        f"{OFFLINE_HINT}"
    )
