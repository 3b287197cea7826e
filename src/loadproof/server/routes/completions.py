"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loadproof.engine.output import CompletionDelta, CompletionOutput, RequestOutput
from loadproof.engine.prompts import TokenizedPrompt
from loadproof.engine.sampling_params import SamplingParams
from loadproof.server.answers import (
    MOST_CHOICES,
    MOST_IN_LOOP,
    check_text_format,
    finish_reason,
    made,
    refusing,
    results,
    submit,
    usage,
    usage_of,
)
from loadproof.server.async_engine import Ask
from loadproof.server.bounds import (
    check_output_entries,
    check_prompt_entries,
    check_room,
    check_text,
    num_entries,
)
from loadproof.server.completion_parts import ChoiceWriter, Piece, PromptPart
from loadproof.server.deadline import Deadline
from loadproof.server.errors import bad_request, unsupported
from loadproof.server.json_parts import Parts, PartsResponse, list_of, with_members
from loadproof.server.routes.documented import GENERATION_ERRORS, errors, streamed
from loadproof.server.schemas.completions import CompletionAnswer, CompletionRequest
from loadproof.server.state import ServerState, new_id, state_of
from loadproof.server.stream import Stream, merged
from loadproof.server.streaming import DONE, MOST_AT_ONCE, EventStream, event, event_of, while_connected

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
    deadline = Deadline.of(body.timeout, state.config.request_timeout)
    work = state.encoder.run(deadline, len(await request.body()), _prompts, state, body)
    prompts = await while_connected(request, work)
    with refusing(body, "prompt"):
        call = _Call(state, body, prompts)
        streams = submit(state, call.asks, deadline)
    if body.stream:
        return EventStream(call.events(streams), headers)
    outputs = await while_connected(request, results(state, streams))
    return PartsResponse(await made(call.answer, outputs, is_large=call.is_large), headers)


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
    for place, text in enumerate(texts):
        check_text(state, text, "prompt" if isinstance(body.prompt, str) else f"prompt[{place}]")
    encoded = state.llm.tokenizer.encode_batch(texts, body.add_special_tokens is not False)
    return [TokenizedPrompt(ids, text, salt) for ids, text in zip(encoded, texts, strict=True)]


class _Call:
    """One call: its requests, and how its answer is written. Choice ``i * n + j`` is prompt i's j-th."""

    def __init__(self, state: ServerState, body: CompletionRequest, prompts: list[TokenizedPrompt]) -> None:
        self._state = state
        self._body = body
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
        self._parts = [PromptPart(body, prompt, state.llm.tokenizer) for prompt in prompts]
        self._num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
        self._has_scores = any(part.has_scores for part in self._parts)
        self._entries = num_entries(state, body.logprobs)
        self.is_large = self._has_scores or bool(self._entries) or len(prompts) * self._n > MOST_CHOICES
        self._check_size()
        if body.max_tokens is not None and "max_tokens" in body.model_fields_set:
            check_room(state, prompts, body.max_tokens, "max_tokens")

    def _check_size(self) -> None:
        body, state = self._body, self._state
        entries = num_entries(state, body.prompt_logprobs)
        if body.echo:
            entries += self._entries
        repeated = entries * self._num_prompt * self._n
        check_prompt_entries(repeated, "logprobs" if body.prompt_logprobs is None else "prompt_logprobs")
        if not self._silent:
            check_output_entries(state, self.asks, "logprobs")

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

    def answer(self, outputs: Sequence[RequestOutput]) -> Parts:
        """The whole answer. Slow where it holds log-probabilities."""
        choices = []
        for place, (prompt, output) in enumerate(zip(self._parts, outputs, strict=True)):
            prompt.scores = output.prompt_logprobs
            for one in output.outputs:
                writer = ChoiceWriter(prompt, place * self._n + one.index)
                choices.append(
                    writer.write(self._piece(one, "length" if self._silent else finish_reason(one)))
                )
        used = usage_of(outputs, 0 if self._silent else None)
        return with_members({**self._head, "usage": used}, {"choices": list_of(choices)})

    def _piece(self, one: CompletionOutput | CompletionDelta, reason: str | None) -> Piece:
        """What is written of a completion, or of what a step added to it: of an echo alone nothing."""
        return Piece(
            text="" if self._silent else one.text,
            token_ids=[] if self._silent else one.token_ids,
            logprobs=() if self._silent else one.logprobs or (),
            finish_reason="length" if self._silent else reason,
            stop_reason=None if self._silent else one.stop_reason,
            seed=one.seed,
        )

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[bytes, None]:
        """The answer's pieces, those of all prompts as they come."""
        num_output = 0
        writers: dict[int, ChoiceWriter] = {}
        try:
            async with aclosing(merged(streams)) as pieces:
                async for place, deltas in pieces:
                    written = bytearray()
                    for delta in self._parts[place].complete(deltas):
                        index = place * self._n + delta.index
                        if index not in writers:
                            writers[index] = ChoiceWriter(self._parts[place], index)
                        num_output += 0 if self._silent else len(delta.token_ids)
                        written += await self._event(writers[index], delta, num_output)
                        if len(written) >= MOST_AT_ONCE:
                            yield bytes(written)
                            written.clear()
                    if written:
                        yield bytes(written)
            if self._body.include_usage:
                cached = sum(stream.output.num_cached_tokens for stream in streams if stream.output)
                used = usage(self._num_prompt, num_output, cached)
                yield event({**self._head, "choices": [], "usage": used})
            yield DONE
        finally:
            self._state.engine.abort(streams)

    async def _event(self, writer: ChoiceWriter, delta: CompletionDelta, num_output: int) -> bytes:
        """The chunk that a piece makes; of an echo alone there is one."""
        if self._silent and writer.begun:
            return b""
        head: dict[str, Any] = dict(self._head)
        if self._body.continuous_usage:
            head["usage"] = usage(self._num_prompt, num_output, 0)

        def write() -> bytes:
            choice = writer.write(self._piece(delta, delta.finish_reason))
            return event_of(with_members(head, {"choices": list_of([choice])}))

        num_entries = len(delta.logprobs or ()) * self._entries
        is_large = num_entries > MOST_IN_LOOP or (self._has_scores and not writer.begun)
        return await asyncio.to_thread(write) if is_large else write()
