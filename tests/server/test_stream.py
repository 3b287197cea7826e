"""A stream's backlog: so many pieces of each of its choices, and never fewer than two steps may bring."""

from __future__ import annotations

import pytest

from loadproof.engine.output import CompletionDelta
from loadproof.server.stream import Stream


@pytest.mark.parametrize(
    ("max_backlog", "num_sequences", "most"),
    [(20, 1, 20), (20, 16, 320), (1, 1, 8), (1, 128, 1024), (9, 2, 18)],
)
def test_pieces_count_for_each_choice(max_backlog: int, num_sequences: int, most: int) -> None:
    stream = Stream("0", num_sequences, True, max_backlog)
    delta = CompletionDelta("0", 0, "a", [5], None, None, None, 1)
    for _ in range(most):
        stream.push(delta)
        assert not stream.is_behind
    stream.push(delta)
    assert stream.is_behind
    assert stream.most_waiting == most
