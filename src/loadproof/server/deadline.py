"""By when a request must be finished: encoding, waiting and generating together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from loadproof.server.errors import ApiError, timed_out


@dataclass(frozen=True)
class Deadline:
    """The time ``at`` of the event loop's clock, ``seconds`` after the request came."""

    seconds: float
    at: float

    @classmethod
    def of(cls, *limits: float | None) -> Deadline | None:
        """From now the shortest of these limits, if there is any."""
        given = [seconds for seconds in limits if seconds is not None]
        if not given:
            return None
        return cls(min(given), asyncio.get_running_loop().time() + min(given))

    def error(self) -> ApiError:
        """What a request that isn't finished by then is answered."""
        return timed_out(self.seconds)
