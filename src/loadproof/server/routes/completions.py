"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from loadproof.engine.output import CompletionDelta, CompletionOutput, PositionLogprobs, RequestOutput
from loadproof.engine.prompts import TokenizedPrompt
from loadproof.engine.sampling_params import SamplingParams
from loadproof.server.answers import (
    check_text_format,
    finish_reason,
    refusing,
    results,
    submit,
    usage,
    usage_of,
)
from loadproof.server.async_engine import Ask
from loadproof.server.errors import bad_request, unsupported
from loadproof.server.logprobs import CompletionLogprobLists, prompt_logprobs
from loadproof.server.routes.documented import GENERATION_ERRORS, errors, streamed
from loadproof.server.schemas.completions import CompletionAnswer, CompletionRequest
from loadproof.server.state import ServerState, new_id, state_of
from loadproof.server.stream import Stream, merged
from loadproof.server.streaming import DONE, EventStream, event, while_connected

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=None,
    responses={**streamed(CompletionAnswer), **errors(*GENERATION_ERRORS)},
    summary="Continue prompts",
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete each prompt ``n`` times; what a completion is depends on nothing but the request."""
    state = state_of(request)
    state.check_model(body.model)
    headers = state.check_fields(body)
    _check(body)
    prompts = await asyncio.to_thread(_prompts, state, body)
    with refusing(body, "prompt"):
        call = _Call(state, body, prompts)
        streams = submit(state, call.asks, body.timeout)
    if body.stream:
        return EventStream(call.events(streams), headers)
    outputs = await while_connected(request, results(state, streams))
    return JSONResponse(call.answer(outputs), headers=headers)


def _check(body: CompletionRequest) -> None:
    body.check_streaming()
    check_text_format(body.response_format)
    if body.suffix:
        raise unsupported("suffix", "suffix is not supported: the model continues texts at their end only")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "best_of other than n is not supported")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens 0 needs echo: there would be no text", "max_tokens")


def _prompts(state: ServerState, body: CompletionRequest) -> list[TokenizedPrompt]:
    """The prompts as tokens. Texts may be long: not for the event loop."""
    given, salt = body.prompt, body.cache_salt
    if isinstance(given, str):
        given = [given]
    if not isinstance(given[0], str):
        id_lists: list[Any] = [given] if isinstance(given[0], int) else given
        return [TokenizedPrompt(ids, None, salt) for ids in id_lists]
    texts: list[Any] = given
    encoded = state.llm.tokenizer.encode_batch(texts, body.add_special_tokens is not False)
    return [TokenizedPrompt(ids, text, salt) for ids, text in zip(encoded, texts, strict=True)]


class _Call:
    """One call: its requests, and how its answer is written. Choice ``i * n + j`` is prompt i's j-th."""

    def __init__(self, state: ServerState, body: CompletionRequest, prompts: list[TokenizedPrompt]) -> None:
        self._state = state
        self._body = body
        self._prompts = prompts
        self._n = body.n or 1
        self._silent = body.max_tokens == 0
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.model_name,
            "system_fingerprint": state.llm.system_fingerprint,
        }
        params = SamplingParams(**{**state.llm.recommended_sampling(), **self._settings()})
        stream = bool(body.stream)
        self.asks = [
            Ask(prompt=prompt, params=params, priority=body.priority or 0, wants_deltas=stream)
            for prompt in prompts
        ]

    def _settings(self) -> dict[str, Any]:
        body = self._body
        settings = body.sampling_settings()
        settings["max_tokens"] = max(1, body.max_tokens) if body.max_tokens is not None else None
        if self._silent:
            settings["min_tokens"] = 0
        settings["logprobs"] = body.logprobs
        if body.echo and body.logprobs is not None:
            asked = (body.logprobs, settings.get("prompt_logprobs", 0))
            settings["prompt_logprobs"] = -1 if -1 in asked else max(asked)
        return settings

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self._choice(place * self._n + one.index, place, output, one)
            for place, output in enumerate(outputs)
            for one in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": usage_of(outputs, 0 if self._silent else None)}

    def _choice(self, index: int, place: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        body = self._body
        text = "" if self._silent else one.text
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(place) + text,
            "logprobs": None,
            "finish_reason": "length" if self._silent else finish_reason(one),
            "stop_reason": None if self._silent else one.stop_reason,
            "seed": one.seed,
        }
        if body.logprobs is not None:
            positions = list((output.prompt_logprobs or ()) if body.echo else ())
            positions += () if self._silent else one.logprobs or ()
            lists = CompletionLogprobLists(body.logprobs)
            choice["logprobs"] = lists.lists(positions, self._first_text(place))
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
            choice["token_ids"] = [] if self._silent else list(one.token_ids)
        return choice

    def _echo(self, place: int) -> str:
        """What a choice's text begins with."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[place]
        if prompt.text is not None:
            return prompt.text
        return self._state.llm.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)

    def _first_text(self, place: int) -> str:
        """The text of the prompt's first token, which nothing precedes."""
        token_id = self._prompts[place].token_ids[0]
        return self._state.llm.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[bytes, None]:
        """The answer's pieces, those of all prompts as they come."""
        body = self._body
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_output = 0
        beginnings = [self._beginning(place) for place in range(len(streams))]
        writers: dict[int, _ChoiceWriter] = {}
        try:
            async with aclosing(merged(streams)) as pieces:
                async for place, deltas in pieces:
                    written = bytearray()
                    for delta in beginnings[place].complete(deltas):
                        index = place * self._n + delta.index
                        if index not in writers:
                            writers[index] = _ChoiceWriter(body, index, beginnings[place])
                        num_output += 0 if self._silent else len(delta.token_ids)
                        for choice in writers[index].choices(delta):
                            chunk: dict[str, Any] = {**self._head, "choices": [choice]}
                            if body.continuous_usage:
                                chunk["usage"] = usage(num_prompt, num_output, 0)
                            written += event(chunk)
                    if written:
                        yield bytes(written)
            if body.include_usage:
                cached = sum(stream.output.num_cached_tokens for stream in streams if stream.output)
                yield event({**self._head, "choices": [], "usage": usage(num_prompt, num_output, cached)})
            yield DONE
        finally:
            self._state.engine.abort(streams)

    def _beginning(self, place: int) -> _Beginning:
        echo, first, prompt = self._echo(place), self._first_text(place), self._prompts[place]
        return _Beginning(
            echo, first, prompt.token_ids, wants_scores=self.asks[0].params.prompt_logprobs is not None
        )


@dataclass(eq=False)
class _Beginning:
    """What the first chunk of each of a prompt's choices holds of the prompt."""

    echo: str
    first_text: str
    token_ids: Sequence[int]
    wants_scores: bool
    scores: Sequence[PositionLogprobs | None] | None = None
    _held: list[CompletionDelta] = field(default_factory=list)

    def complete(self, deltas: Sequence[CompletionDelta]) -> list[CompletionDelta]:
        """The pieces that can be written: all of them, once the prompt's scores are there if it has any."""
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                self.scores = delta.prompt_logprobs
        self._held += deltas
        if self.wants_scores and self.scores is None:
            return []
        ready, self._held = self._held, []
        return ready


class _ChoiceWriter:
    """Writes the chunks of one choice; the first one holds what belongs to its prompt."""

    def __init__(self, body: CompletionRequest, index: int, beginning: _Beginning) -> None:
        self._body = body
        self._index = index
        self._beginning = beginning
        self._silent = body.max_tokens == 0
        self._lists = None if body.logprobs is None else CompletionLogprobLists(body.logprobs)
        self._begun = False

    def choices(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """The entry that a piece makes; of an echo alone there is one."""
        if self._silent:
            return [] if self._begun else [self._choice(delta, "", [], (), "length", None)]
        positions, reason = delta.logprobs or (), delta.finish_reason
        return [self._choice(delta, delta.text, delta.token_ids, positions, reason, delta.stop_reason)]

    def _choice(
        self,
        delta: CompletionDelta,
        text: str,
        token_ids: list[int],
        positions: Sequence[PositionLogprobs],
        reason: str | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
        all_positions: list[PositionLogprobs | None] = list(positions)
        if not self._begun:
            self._begun = True
            all_positions[:0] = self._begin(choice, delta)
        if self._lists is not None:
            choice["logprobs"] = self._lists.lists(all_positions, self._beginning.first_text)
        return choice

    def _begin(self, choice: dict[str, Any], delta: CompletionDelta) -> Sequence[PositionLogprobs | None]:
        """Add what the prompt brings; the positions that come before the choice's own."""
        beginning, body = self._beginning, self._body
        choice["text"] = beginning.echo + choice["text"]
        choice["seed"] = delta.seed
        if body.return_token_ids:
            choice["prompt_token_ids"] = list(beginning.token_ids)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(beginning.scores or ())
        return beginning.scores or () if body.echo else ()
