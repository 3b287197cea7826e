"""Faults that the simulator has found, each by the smallest case that shows it; and rare scenarios."""

from __future__ import annotations

from tests.simulation.simulator import simulate

from loadproof import SamplingParams
from loadproof.engine.prefix_keys import PrefixKeys, root_digest
from loadproof.engine.request import Request


def test_keys_follow_tokens_that_are_taken_back() -> None:
    """After a failed listener a request begins again with fewer tokens than its keys are made of."""
    request = Request("a", 0, [1, 2, 3], SamplingParams(), 0, 8, frozenset(), output_token_ids=[4, 5, 6])
    prefix = PrefixKeys(root_digest(None, 0), 2)
    prefix.extend(request)
    keys = list(prefix.keys)
    del request.output_token_ids[1:]
    prefix.extend(request)
    assert prefix.keys == keys[:2]
    request.output_token_ids += [5, 6, 7, 8]
    prefix.extend(request)
    assert prefix.keys[:3] == keys
    assert len(prefix.keys) == 4


def test_the_best_waits_anew_where_its_hits_are_gone() -> None:
    """One reset of the cache in the very step that it waits: once in twelve million steps."""
    assert simulate(6004087).resets > 0
