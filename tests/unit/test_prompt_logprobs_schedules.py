"""Any mix of scoring and other requests under any limits: each prompt's scores are the model's own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.prompt_drive import Served, confirm

from loadproof import RequestOutput

STEMS = [[index * step % 251 for index in range(60)] for step in (7, 11)]
TEXTS = st.builds(
    lambda stem, shared, tail: (STEMS[stem][:shared] + tail) or [1],
    st.integers(0, 1),
    st.integers(0, 60) | st.sampled_from([15, 16, 17, 32, 48]),
    st.lists(st.integers(0, 3), max_size=20),
)


@dataclass(frozen=True)
class Ask:
    """A request, how many steps after the one before it comes, and after how many it is aborted."""

    prompt: list[int]
    k: int | None
    max_tokens: int
    n: int
    gap: int
    priority: int
    salt: str | None
    abort_after: int | None


ASKS = st.lists(
    st.builds(
        Ask,
        prompt=TEXTS,
        k=st.sampled_from([None, 0, 1, 2, 5, 33]),
        max_tokens=st.sampled_from([1, 2, 17, 40]),
        n=st.sampled_from([1, 1, 1, 2]),
        gap=st.integers(0, 4),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "a"]),
        abort_after=st.sampled_from([None, None, None, 0, 2, 5]),
    ),
    min_size=1,
    max_size=6,
)
SETTINGS = st.fixed_dictionaries(
    {
        "caching": st.booleans(),
        "keeps_hidden": st.booleans(),
        "ahead": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "prefill": st.sampled_from([1, 5, 16, 512]),
        "max_num_batched_tokens": st.integers(1, 64),
        "max_num_seqs": st.integers(1, 5),
        "num_blocks": st.sampled_from([8, 9, 12, 30]),
    }
)


class Run:
    """Has the asks arrive in their turn, with failures and resets between."""

    def __init__(self, options: dict[str, Any], failing: int | None, reset_at: int | None) -> None:
        self.served = Served(**options)
        self.served.device.fail_at_step = failing
        self.ranked = options["policy"] == "priority"
        self.reset_at = reset_at
        self.num_steps = 0
        self.aborts: dict[str, int] = {}  # by request, the step before which
        self.outputs: list[list[RequestOutput]] = []

    def ask(self, ask: Ask) -> None:
        placing = {"priority": ask.priority if self.ranked else 0, "cache_salt": ask.salt}
        name = str(len(self.outputs))
        self.outputs.append(
            self.served.ask(ask.prompt, ask.k, max_tokens=ask.max_tokens, n=ask.n, placing=placing)
        )
        if ask.abort_after is not None:
            self.aborts[name] = self.num_steps + ask.abort_after
        for _ in range(ask.gap):
            self.step()

    def step(self) -> None:
        for name, at in self.aborts.items():
            if at == self.num_steps:
                with suppress(RuntimeError):  # nothing is left, and what was in flight failed
                    self.served.engine.abort_request(name)
        if self.num_steps == self.reset_at:
            self.served.engine.reset_prefix_cache()
        self.num_steps += 1
        with suppress(RuntimeError):
            self.served.engine.step()

    def drain(self) -> None:
        while self.served.engine.has_unfinished():
            self.step()


@settings(max_examples=120)
@given(
    asks=ASKS,
    options=SETTINGS,
    failing=st.none() | st.integers(1, 12),
    reset_at=st.none() | st.integers(0, 12),
)
def test_every_prompt_gets_the_models_own_log_probabilities(
    asks: list[Ask], options: dict[str, Any], failing: int | None, reset_at: int | None
) -> None:
    run = Run(options, failing, reset_at)
    for ask in asks:
        run.ask(ask)
    run.drain()
    for ask, outputs in zip(asks, run.outputs, strict=True):
        (output,) = outputs
        aborted = any(one.finish_reason == "abort" for one in output.outputs)
        if ask.k is None:
            assert output.prompt_logprobs is None
        elif not aborted or output.prompt_logprobs is not None:
            confirm(output, ask.k)
    device = run.served.device
    assert max(device.largest_step, device.most_scored) <= options["max_num_batched_tokens"]
    stats = run.served.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    if failing is None and not run.aborts and not options["caching"]:
        assert device.num_scored == sum(len(ask.prompt) - 1 for ask in asks if ask.k is not None)
