"""What happened in a simulation: counts that say whether it proves anything."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Summary:
    """Counts of one scenario, or of many together."""

    steps: int = 0  # submitted to the device
    scenarios: int = 0
    requests: int = 0
    rows: int = 0
    tokens: int = 0  # that counted
    discarded_tokens: int = 0  # sampled in vain, in flight when their request ended
    carried_rows: int = 0
    preemptions: int = 0
    preemptions_in_flight: int = 0  # of requests with rows in a submitted step
    preemptions_in_prefill: int = 0  # of requests that had not reached their last known token
    resumed_with_hits: int = 0
    sat_out_steps: int = 0
    hit_tokens: int = 0
    parked: int = 0  # steps before which a request waited for a block that another computes
    evictions: int = 0
    resets: int = 0
    aborts_waiting: int = 0
    aborts_running: int = 0
    aborts_in_last_step: int = 0
    stopped_by_token: int = 0
    stopped_by_host: int = 0
    failures: int = 0
    scored: int = 0  # positions of prompts
    scores_from_cache: int = 0  # positions that cached blocks had them of
    chunks_without_rows: int = 0  # that only score
    preemptions_in_scoring: int = 0

    def add(self, other: Summary) -> None:
        """Count another scenario in."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
