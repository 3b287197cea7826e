"""Requests that arrive while others decode, more than the blocks hold, and what became of each."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tests.exactness.transcript import Transcript, first_parting

from loadproof import LLM, RequestOutput, SamplingParams
from loadproof.devices.device import F32
from loadproof.engine.output import CompletionDelta

STEPS_A_POSITION = 3  # a better request may wait for two steps in flight before it moves on


@dataclass(frozen=True)
class Ask:
    """A request, how many steps after the one before it comes, and when it is aborted, if it is."""

    prompt: list[int]
    params: SamplingParams
    gap: int = 0
    priority: int = 0
    abort_at: tuple[int, int] | None = None  # so many steps after it has so many tokens

    @property
    def length(self) -> int:
        """Most tokens of prompt and output."""
        assert self.params.max_tokens is not None
        return len(self.prompt) + self.params.max_tokens


@dataclass(frozen=True)
class Answer:
    """What a request got, and the text that its pieces made."""

    transcript: Transcript
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class Run:
    """Answers in the order of the asks, and the engine's counters after them."""

    answers: list[Answer]
    stats: dict[str, int]
    aborted_as: Counter[str]  # how many were waiting, running, leaving when they were aborted

    def pressure(self) -> dict[str, int]:
        """What a run must have had to prove anything."""
        names = ("num_preemptions", "num_resumed_with_hits", "num_sat_out_steps", "num_steps")
        return {name: self.stats[name] for name in (*names, "prefix_cache_evictions", "prefix_cache_hits")}


@dataclass
class _Client:
    """Whoever asked: collects what the engine says."""

    ask: Ask
    request_id: str = ""
    steps_left: int = 0  # until it is aborted, once it has the tokens for that
    logits: list[str] = field(default_factory=list)
    num_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    output: RequestOutput | None = None

    def on_delta(self, delta: CompletionDelta) -> None:
        assert self.output is None, "a piece after the whole"
        self.pieces.append(delta.text)
        self.num_tokens += len(delta.token_ids)

    def on_output(self, output: RequestOutput) -> None:
        assert self.output is None, "the whole twice"
        self.output = output

    @property
    def gives_up(self) -> bool:
        """Whether now is the time to abort it; to be asked once a step."""
        if self.ask.abort_at is None or self.output is not None or self.num_tokens < self.ask.abort_at[1]:
            return False
        self.steps_left -= 1
        return self.steps_left < 0

    def answer(self) -> Answer:
        assert self.output is not None, f"request {self.request_id} has no answer"
        (completion,) = self.output.outputs
        assert completion.logprobs is not None
        assert completion.text == "".join(self.pieces), "the pieces are not the whole"
        logprobs = [
            [(token, entry.logprob, entry.rank) for token, entry in position.items()]
            for position in completion.logprobs
        ]
        transcript = Transcript(completion.token_ids, self.logits, logprobs)
        return Answer(transcript, completion.text, completion.finish_reason)


def drive(llm: LLM, asks: Sequence[Ask]) -> Run:
    """Have every ask arrive in its turn, step until all are answered, and take the answers down.

    The best-ranked request moves on in all but a few steps, and a better one may take away once what it has
    computed: so the steps are bounded, and more of them are a livelock.
    """
    bound = STEPS_A_POSITION * (sum(ask.length for ask in asks) + len(asks) * max(a.length for a in asks))
    clients: dict[str, _Client] = {}
    aborted_as: Counter[str] = Counter()
    coming = deque(zip(accumulate(ask.gap for ask in asks), asks, strict=True))

    def on_logits(request_id: str, index: int, position: int, logits: F32) -> None:
        digest = hashlib.blake2b(logits.tobytes(), digest_size=16).hexdigest()
        clients[request_id].logits.append(f"{index}/{position}/{digest}")

    llm.on_logits(on_logits)
    step = 0
    while coming or llm.engine.has_unfinished():
        while coming and coming[0][0] <= step:
            client = _add(llm, coming.popleft()[1])
            clients[client.request_id] = client
        for client in clients.values():
            if client.gives_up:
                aborted_as[_abort(llm, client)] += 1
        llm.engine.step()
        step += 1
        assert step <= bound, f"{len(asks)} requests are not through after {bound} steps"
    llm.on_logits(None)
    stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"], "blocks are held for nobody"
    return Run([client.answer() for client in clients.values()], stats, aborted_as)


def drive_alone(llm: LLM, asks: Sequence[Ask]) -> list[Answer]:
    """Each ask's answer from an engine that has nothing else to do."""
    alone = [Ask(ask.prompt, ask.params) for ask in asks]
    return [drive(llm, [ask]).answers[0] for ask in alone]


def difference(found: Sequence[Answer], expected: Sequence[Answer]) -> str | None:
    """The first answer that isn't the one alone in every bit, in words; aborted ones as far as they go."""
    pairs = list(zip(found, expected, strict=True))
    heads = [_head(b.transcript, len(a.transcript.tokens)) if _aborted(a) else b.transcript for a, b in pairs]
    problem = first_parting([a.transcript for a, _ in pairs], heads)
    if problem is not None:
        return problem
    for number, (one, other) in enumerate(pairs):
        if not _aborted(one) and (one.text, one.finish_reason) != (other.text, other.finish_reason):
            return f"prompt {number}: {one.text!r} ({one.finish_reason}), alone {other.text!r}"
    return None


def _add(llm: LLM, ask: Ask) -> _Client:
    client = _Client(ask)
    client.steps_left = ask.abort_at[0] if ask.abort_at else 0
    client.request_id = llm.engine.add_request(
        ask.prompt,
        ask.params,
        priority=ask.priority,
        on_delta=client.on_delta,
        on_output=client.on_output,
    )
    return client


def _abort(llm: LLM, client: _Client) -> str:
    """Abort a request; returns how it stood."""
    (completion,) = llm.engine._groups[client.request_id].completions
    status = completion.request.status
    assert llm.engine.abort_request(client.request_id)
    return status.value


def _aborted(answer: Answer) -> bool:
    return answer.finish_reason == "abort"


def _head(transcript: Transcript, count: int) -> Transcript:
    return Transcript(transcript.tokens[:count], transcript.logits[:count], transcript.logprobs[:count])
