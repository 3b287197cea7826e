"""A line every few seconds about what the engine does, while it does anything."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from loadproof.engine.engine import Engine
from loadproof.server.errors import ApiError
from loadproof.server.logs import with_fields

if TYPE_CHECKING:
    from loadproof.server.async_engine import AsyncEngine

_log = logging.getLogger("loadproof.engine")
INTERVAL = 10.0  # seconds


async def log_engine(engine: AsyncEngine) -> None:
    """Log what the engine does until it dies, or this is cancelled; and that it doesn't answer, if so."""
    before: dict[str, int] | None = None
    since = time.monotonic()
    while True:
        try:
            after = await engine.call(Engine.stats, INTERVAL)
        except TimeoutError:
            silent = round(time.monotonic() - since, 1)
            _log.warning("the engine does not answer", extra=with_fields({"seconds": silent}))
        except ApiError:  # it has died, and said so itself
            return
        else:
            now = time.monotonic()
            fields = activity(before, after, now - since) if before is not None else {}
            if fields:
                _log.info("engine", extra=with_fields(fields))
            before, since = after, now
        await asyncio.sleep(INTERVAL)


def activity(
    before: Mapping[str, int], after: Mapping[str, int], seconds: float
) -> dict[str, float | int | None]:
    """What happened between two looks at :meth:`Engine.stats`; empty if nothing did and nothing is to do."""
    done = {name: after[name] - before[name] for name in after if name in before}
    busy = after["num_running"] or after["num_waiting"]
    if not (busy or done["prompt_tokens"] or done["generation_tokens"]):
        return {}
    queries = done["prefix_cache_queries"]
    used = 1.0 - after["num_free_blocks"] / after["num_blocks"]
    return {
        "prompt_tokens_per_second": round(done["prompt_tokens"] / seconds, 1),
        "generation_tokens_per_second": round(done["generation_tokens"] / seconds, 1),
        "running": after["num_running"],
        "waiting": after["num_waiting"],
        "kv_cache_usage": round(used, 3),
        "prefix_cache_hit_rate": round(done["prefix_cache_hits"] / queries, 3) if queries else None,
        "preemptions": done["num_preemptions"] or None,
    }
