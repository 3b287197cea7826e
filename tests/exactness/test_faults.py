"""The exactness comparison is worth something: faults of deployed engines, put back, are caught.

Each runs on the real code and native kernels with a tiny model, first with all of the engine's own checks,
then without the check of its books: then the comparison with each answer alone has to see what the fault did,
unless something that is always there refuses first.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.exactness import faults
from tests.exactness.faults import PutBack, watch_blocks
from tests.exactness.pressure import Answer, Ask, Run, difference, drive, drive_alone
from tests.tiny_models import write_model

from loadproof import LLM, SamplingParams
from loadproof.config import ConfigError
from loadproof.engine.admission import RequestError

# Few rows a step and few blocks: requests sit out, give way, and resume with hits in several chunks.
TIGHT: dict[str, Any] = {
    "max_model_len": 130,
    "num_blocks_override": 9,
    "block_size": 16,
    "max_num_batched_tokens": 6,
    "max_num_seqs": 64,
    "scheduling_policy": "priority",
    "num_threads": 1,
}
ROOMY: dict[str, Any] = {"num_blocks_override": 200, "max_num_batched_tokens": 256}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5},
)
COMPARED = "comparison: prompt"


@dataclass(frozen=True)
class Fault:
    """A fault, what it runs with, and what stops it, as a pattern: with the books checked, and without."""

    put_back: PutBack
    checked: str
    unchecked: str
    settings: dict[str, Any] = field(default_factory=dict)
    last: int = 0  # so many of the requests, the last ones; 0 for all


FAULTS = [
    Fault(faults.logits_counted_from_the_prompt, "slots must be distinct", "slots must be distinct"),
    Fault(
        faults.logits_counted_from_the_prompt_past_the_device,
        "^AssertionError: $",
        "^AssertionError: $",
        {"async_scheduling": False},
    ),
    Fault(
        faults.logits_counted_from_the_prompt_and_nobody_looks,
        "IntegrityError: .*past its length",
        COMPARED,
        {"async_scheduling": False},
    ),
    Fault(faults.every_decode_reads_its_slot, "ValueError: .*carries over", "ValueError: .*carries over"),
    Fault(faults.a_row_that_sat_out_is_not_seeded, COMPARED, COMPARED),
    Fault(faults.host_tokens_cut, COMPARED, COMPARED),
    Fault(faults.pending_counted_twice, "IntegrityError", COMPARED),
    Fault(faults.placeholders_reach_the_embedding, COMPARED, COMPARED),
    Fault(faults.placeholders_out_of_the_vocabulary, "outside the vocab", "outside the vocab"),
    Fault(faults.blocks_freed_under_a_step, "handed out while a step writes it", "IndexError|comparison"),
    Fault(
        faults.blocks_offered_when_allocated, "IntegrityError: .*published what isn't there", COMPARED, last=2
    ),
    Fault(faults.penalties_see_placeholders, COMPARED, COMPARED, ROOMY),
    Fault(
        faults.whoever_asks_wins,
        "not through after",
        "not through after",
        {"enable_prefix_caching": False},
        2,
    ),
    Fault(faults.resumed_taken_for_a_decode, COMPARED, COMPARED),
    Fault(faults.resumed_with_anothers_blocks, COMPARED, COMPARED),
    Fault(faults.freed_by_the_abort_and_by_its_step, "handed out while|freed twice", "freed twice"),
    Fault(
        faults.a_cancel_frees_what_others_share,
        "holders",
        "published as something else|freed twice|comparison",
    ),
    Fault(faults.a_token_comes_after_the_cancel, COMPARED, COMPARED),
    Fault(faults.stops_are_sought_in_pieces, COMPARED, COMPARED, ROOMY),
]


@dataclass(frozen=True)
class Subject:
    """A model, requests, and each one's answer alone."""

    model: Path | str
    asks: list[Ask]
    alone: list[Answer]

    def run(self, asks: Sequence[Ask], **settings: Any) -> Run:
        with LLM(self.model, **{**TIGHT, **settings}) as llm, pytest.MonkeyPatch.context() as patch:
            watch_blocks(llm.engine._pipeline, patch)
            return drive(llm, asks)

    def answers_with(self, put_back: PutBack, **settings: Any) -> list[Answer]:
        """What is answered with a fault that nothing stops."""
        with LLM(self.model, **{**TIGHT, **settings}) as llm, pytest.MonkeyPatch.context() as patch:
            put_back(patch)
            return drive(llm, self.asks).answers

    def stopped_by(self, fault: Fault, **settings: Any) -> str:
        """What stops a fault: an error, or a difference from the answers alone; "nothing" if none does."""
        settings = {**TIGHT, **fault.settings, **settings}
        with LLM(self.model, **settings) as llm, pytest.MonkeyPatch.context() as patch:
            fault.put_back(patch)
            if settings.get("check_integrity"):
                watch_blocks(llm.engine._pipeline, patch)
            try:
                found = drive(llm, self.asks[-fault.last :])
            except (ValueError, AssertionError, LookupError) as error:
                return f"{type(error).__name__}: {error}"
        problem = difference(found.answers, self.alone[-fault.last :])
        return "nothing" if problem is None else f"comparison: {problem}"


def requests(count: int = 36) -> list[Ask]:
    """Of every kind; half of the prompts share their first 48 tokens; a sixth of them give up.

    The last two are the longest, and want nearly all blocks each; the very last is the more important one,
    and shares what the other is just computing.
    """
    draw = random.Random(11)
    shared = [draw.randrange(2, 258) for _ in range(48)]
    letters = dict.fromkeys(range(34, 92), 12.0)
    asks = []
    for number in range(count):
        prompt = shared * (number % 2) + [draw.randrange(2, 258) for _ in range(draw.randint(2, 12))]
        if number >= count - 2:
            prompt = shared[:8] * 9 + prompt[:8]
        params = SamplingParams(
            seed=number,
            max_tokens=draw.randint(40, 50),
            ignore_eos=True,
            logprobs=number % 3,
            logit_bias=letters,
            **KINDS[number // 2 % len(KINDS)],
        )
        abort_at = (draw.randint(0, 3), draw.randrange(40)) if number % 6 == 1 else None
        asks.append(Ask(prompt, params, draw.randint(0, 12), draw.randrange(8), abort_at))
    asks[-2:] = [replace(asks[-2], priority=8, abort_at=None), replace(asks[-1], priority=0, gap=3)]
    return asks


def with_split_stops(llm: LLM, asks: Sequence[Ask]) -> list[Ask]:
    """Every fifth ends at a stop string that two tokens of its answer bring together."""
    changed = list(asks)
    for number in range(0, len(asks) - 2, 5):
        answer = drive_alone(llm, [asks[number]])[0]
        pieces = [llm.tokenizer.decode([token]) for token in answer.transcript.tokens]
        at = next(i for i in range(8, len(pieces)) if (pieces[i - 1] + pieces[i]).isascii())
        stop = pieces[at - 1] + pieces[at]
        changed[number] = replace(asks[number], params=replace(asks[number].params, stop=(stop,)))
    return changed


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    model = write_model(tmp_path_factory.mktemp("model"), "llama")
    with LLM(model, max_model_len=130, enable_prefix_caching=False, num_threads=1) as llm:
        asks = with_split_stops(llm, requests())
        yield Subject(model, asks, drive_alone(llm, asks))


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
@pytest.mark.parametrize(
    "settings", [{}, ROOMY, {"enable_prefix_caching": False}], ids=["tight", "roomy", "no cache"]
)
def test_without_a_fault_nothing_differs(subject: Subject, settings: dict[str, Any], ahead: bool) -> None:
    found = subject.run(subject.asks, check_integrity=True, async_scheduling=ahead, **settings)
    assert difference(found.answers, subject.alone) is None
    assert found.aborted_as.total() >= 2
    pressure = found.pressure()
    if settings is not ROOMY:
        assert pressure["num_preemptions"] > 5
        assert pressure["num_sat_out_steps"] > 0
        assert (pressure["num_resumed_with_hits"] > 0) == (not settings)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.put_back.__name__)
def test_a_fault_is_caught(subject: Subject, fault: Fault) -> None:
    stopped_by = subject.stopped_by(fault, check_integrity=True)
    assert re.search(fault.checked, stopped_by), stopped_by
    stopped_by = subject.stopped_by(fault)
    assert re.search(fault.unchecked, stopped_by), stopped_by


def test_a_prompt_larger_than_the_cache_is_refused_with_the_numbers(subject: Subject) -> None:
    """Nobody else notices; and were it let in, the scheduler would refuse it in its turn."""
    too_long, params = [7] * 130, SamplingParams(max_tokens=4)
    with LLM(subject.model, **TIGHT) as llm, pytest.MonkeyPatch.context() as patch:
        llm.engine.add_request(subject.asks[0].prompt, subject.asks[0].params, request_id="before")
        with pytest.raises(RequestError, match=r"130 tokens; at most 129 fit.* max_model_len 130"):
            llm.engine.add_request(too_long, params)
        assert llm.stats()["num_waiting"] == 1
        faults.requests_are_not_measured(patch)
        with pytest.raises(AssertionError):
            llm.engine.add_request(too_long, params)
    with pytest.raises(ConfigError, match=r"max_model_len 130 .* holds 128 tokens"):
        LLM(subject.model, **{**TIGHT, "num_blocks_override": 8})


def test_an_abort_after_any_step_harms_nobody(subject: Subject) -> None:
    """Also before the first and in the last one, with another step on its way, and of whoever gave way."""
    others = [35, 0, 2]
    asks = [replace(subject.asks[i], abort_at=None, gap=2) for i in (34, *others)]
    alone = [subject.alone[i] for i in (34, *others)]
    seen: set[str] = set()
    for after in range(250):
        asks[0] = replace(asks[0], abort_at=(after, 0))
        found = subject.run(asks, check_integrity=True, max_num_batched_tokens=16)
        assert difference(found.answers, alone) is None, f"aborted after {after} steps"
        if not found.aborted_as:
            break
        seen |= set(found.aborted_as)
    assert after < 249, "its last step was never reached"
    assert seen == {"waiting", "running"}


# The two on the real model, where one can read what they do.


@pytest.fixture(scope="module")
def chats(smollm2: Path) -> Subject:
    """Four chats that decode while more important prompts arrive, with four rows a step."""
    with LLM("smollm2-135m", max_model_len=130, enable_prefix_caching=False, num_threads=2) as llm:
        prompts: list[str] = json.loads((Path(__file__).parent / "prompts.json").read_text())
        texts = [prompts[i] for i in (0, 1, 2, 3, 4, 5)]
        ids = [list(llm.chat_prompt([{"role": "user", "content": text}]).token_ids) for text in texts]
        greedy = SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True)
        places = [(0, 5), (0, 5), (0, 5), (0, 5), (40, 1), (20, 2)]
        asks = [Ask(one, greedy, gap, priority) for one, (gap, priority) in zip(ids, places, strict=True)]
        return Subject("smollm2-135m", asks, drive_alone(llm, asks))


@pytest.mark.real_model
def test_the_real_model_under_the_same_load(chats: Subject) -> None:
    found = chats.run(chats.asks, check_integrity=True)
    assert difference(found.answers, chats.alone) is None
    pressure = found.pressure()
    for name in ("num_preemptions", "num_sat_out_steps", "num_resumed_with_hits"):
        assert pressure[name] > 0, name


@pytest.mark.real_model
def test_a_logits_row_for_each_position_computed_again_repeats_the_tail(chats: Subject) -> None:
    """The answer comes to the point where it was resumed, and says again what it said since the hits."""
    fault = faults.logits_counted_from_the_prompt_and_nobody_looks
    answers = chats.answers_with(fault, async_scheduling=False)
    assert difference(answers, chats.alone) is not None
    repeated = 0
    for found, alone in zip(answers, chats.alone, strict=True):
        tokens, expected = found.transcript.tokens, alone.transcript.tokens
        same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
        if same is not None:
            assert any(tokens[same : same + n] == tokens[same - n : same] for n in range(2, same + 1)), (
                found.text
            )
            repeated += 1
            print(f"{alone.text!r} became {found.text!r}")
    assert repeated > 0


@pytest.mark.real_model
def test_a_row_that_sat_out_decodes_from_a_stale_token(chats: Subject) -> None:
    """Its token is fed again instead of the one that followed: from there on the answer is another one."""
    answers = chats.answers_with(faults.a_row_that_sat_out_is_not_seeded)
    problem = difference(answers, chats.alone)
    assert problem is not None
    assert "logits" in problem
    changed = [
        (found.text, alone.text)
        for found, alone in zip(answers, chats.alone, strict=True)
        if found.text != alone.text
    ]
    assert changed
    for found_text, text in changed:
        print(f"{text!r} became {found_text!r}")
