"""A histogram that costs next to nothing to feed, and the bounds that vLLM's have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.utils import floatToGoString

# Seconds, and numbers, of vLLM's histograms by the same names: dashboards read the same from both.
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
NEXT_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005),  # ours: small models take no longer
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
PARAMS_N = (1.0, 2.0, 5.0, 10.0, 20.0)


def token_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to ``limit``."""
    bounds = (float(digit * 10**power) for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= limit)


class Histogram:
    """Counts values by the first of its bounds that isn't less than them.

    One thread observes; any may read meanwhile, and may then find the newest value in the counts alone.
    """

    __slots__ = ("_bounds", "_counts", "_names", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._names = [*map(floatToGoString, self._bounds), "+Inf"]
        self._total = 0.0

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._total

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def buckets(self) -> list[tuple[str, float]]:
        """By upper bound, as Prometheus writes it: how many values were at most that."""
        sums, so_far = [], 0
        for name, count in zip(self._names, self._counts.copy(), strict=True):
            so_far += count
            sums.append((name, float(so_far)))
        return sums
