"""What the log says when a server starts: what it serves, how, and where."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from loadproof import __version__
from loadproof.server.logs import with_fields
from loadproof.server.security import is_loopback
from loadproof.server.settings import ServerConfig

if TYPE_CHECKING:
    from loadproof.devices.device import DeviceLimits
    from loadproof.llm import LLM

_log = logging.getLogger("loadproof.server")


def log_model(llm: LLM) -> None:
    """The model, and how many sequences have room at once."""
    device, limits = llm.engine.device, llm.engine.device.limits
    how = {
        "model": llm.config.model,
        "format": getattr(device, "numeric_format", None),
        "isa": getattr(device, "isa", None),
        "threads": getattr(device, "num_threads", None),
        "fingerprint": device.fingerprint,
    }
    _log.info("loadproof %s serves %s", __version__, llm.model_name, extra=with_fields(how))
    sizes = {
        "kv_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
    }
    _log.info(
        "%d sequences run at once; the cache holds %.1f of the greatest length",
        limits.max_num_seqs,
        num_full_sequences(limits),
        extra=with_fields(sizes),
    )


def log_url(url: str, port: int, config: ServerConfig) -> None:
    """Where the server is, as fields that programs can read, and who else may come in there."""
    if not is_loopback(config.host) and not config.api_keys:
        _log.warning("no api_key is set, so whoever reaches %s may use the server", config.host)
    where = {"url": url, "port": port, "pid": os.getpid()}
    _log.info("ready: the page is at %s/, the API at %s/v1", url, url, extra=with_fields(where))


def num_full_sequences(limits: DeviceLimits) -> float:
    """How many sequences of the greatest length the key-value cache holds."""
    return limits.num_blocks / -(-limits.max_model_len // limits.block_size)
