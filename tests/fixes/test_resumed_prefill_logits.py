"""The fix resumed-prefill-logits: how many rows of logits each request gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fixes.engines import RESUMED, RIGHT, Engine, install

PROMPT = 8


@dataclass
class Request:
    """A request as it enters the batch."""

    num_computed_tokens: int
    outputs: int
    guide: str = ""

    @property
    def prompt_token_ids(self) -> list[int]:
        return [1] * PROMPT

    @property
    def output_token_ids(self) -> list[int]:
        return [2] * self.outputs

    @property
    def num_tokens(self) -> int:
        return PROMPT + self.outputs


def prefill_logits(engine: Engine, request: Request, scheduled: int) -> int | None:
    """How many tokens are sampled for a request in its next step; None where it decodes."""
    batch: Any = engine.run()["InputBatch"](1)
    batch.add_request(request, 0)
    if batch.num_computed_tokens[0] >= batch.num_prompt_tokens[0]:
        return None
    return int(max(0, batch.num_computed_tokens[0] + scheduled - batch.num_prompt_tokens[0] + 1))


# Computed tokens, earlier outputs, scheduled tokens; then the rows of logits, before the fix and after it.
CASES = {
    "fresh": (0, 0, 8, 1, 1),
    "fresh, first chunk": (0, 0, 5, 0, 0),
    "fresh, last chunk": (5, 0, 3, 1, 1),
    "fresh with hits": (4, 0, 4, 1, 1),
    "resumed without hits": (0, 5, 13, 1, 1),
    "resumed without hits, first chunk": (0, 5, 10, 0, 0),
    "resumed with hits in the prompt": (4, 5, 9, 6, 1),
    "resumed with hits in the prompt, first chunk": (4, 5, 5, 2, 0),
    "resumed with hits up to the outputs": (8, 5, 5, None, 1),
    "resumed with hits in the outputs": (10, 5, 3, None, 1),
    "resumed with hits but for two": (11, 5, 2, None, 1),
    "resumed with hits but for one": (12, 5, 1, None, None),
    "decode": (12, 5, 1, None, None),
    "decode of the first output": (8, 1, 1, None, None),
    "decode ahead of its results": (13, 5, 1, None, None),
    "speculating": (12, 5, 4, None, None),
    "speculating ahead of its results": (15, 5, 4, None, None),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_of_logits(tmp_path: Path, case: str) -> None:
    computed, outputs, scheduled, before, after = CASES[case]
    engine = install(tmp_path, RESUMED)
    request = Request(computed, outputs)

    assert prefill_logits(engine, request, scheduled) == before
    assert engine.fix.apply(engine.root).status == "applied"
    assert prefill_logits(engine, request, scheduled) == after


def test_faulty_engine_samples_once_per_recomputed_output(tmp_path: Path) -> None:
    engine = install(tmp_path, RESUMED)

    assert [prefill_logits(engine, Request(4, n), 4 + n) for n in range(4)] == [1, 2, 3, 4]
    engine.fix.apply(engine.root)
    assert [prefill_logits(engine, Request(4, n), 4 + n) for n in range(4)] == [1, 1, 1, 1]


def test_release_with_the_upstream_change_behaves_like_the_fix(tmp_path: Path) -> None:
    upstream = install(tmp_path / "upstream", RESUMED, RIGHT[RESUMED])
    fixed = install(tmp_path / "fixed", RESUMED)
    fixed.fix.apply(fixed.root)

    for computed in range(16):
        for outputs in range(6):
            request = Request(computed, outputs)
            assert prefill_logits(upstream, request, 3) == prefill_logits(fixed, request, 3)
