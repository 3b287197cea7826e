"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from loadproof.engine.output import CompletionDelta, CompletionOutput, PositionLogprobs, RequestOutput
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
from loadproof.server.bounds import check_output_entries, check_prompt_entries, check_room, num_entries
from loadproof.server.chat_prompt import chat_prompt
from loadproof.server.deadline import Deadline
from loadproof.server.errors import bad_request, unsupported
from loadproof.server.json_parts import Parts, PartsResponse, list_of, with_members
from loadproof.server.logprobs import chat_logprobs, prompt_logprobs
from loadproof.server.routes.documented import GENERATION_ERRORS, errors, streamed
from loadproof.server.schemas.chat import ChatAnswer, ChatRequest
from loadproof.server.state import ServerState, new_id, state_of
from loadproof.server.stream import Stream
from loadproof.server.streaming import DONE, MOST_AT_ONCE, EventStream, event, event_of, while_connected

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={**streamed(ChatAnswer), **errors(*GENERATION_ERRORS)},
    summary="Answer a chat",
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a chat ``n`` times; what an answer is depends on nothing but the request."""
    state = state_of(request)
    state.check_model(body.model)
    headers = state.check_fields(body)
    _check(body)
    deadline = Deadline.of(body.timeout, state.config.request_timeout)
    work = state.encoder.run(deadline, len(await request.body()), chat_prompt, state, body)
    prompt = await while_connected(request, work)
    with refusing(body, "messages", {"logprobs": "top_logprobs"}):
        call = _Call(state, body, prompt)
        streams = submit(state, [call.ask], deadline)
    if body.stream:
        return EventStream(call.events(streams[0]), headers)
    (output,) = await while_connected(request, results(state, streams))
    return PartsResponse(await made(call.answer, output, is_large=call.is_large), headers)


def _check(body: ChatRequest) -> None:
    body.check_streaming()
    check_text_format(body.response_format)
    if body.tools:
        raise unsupported("tools", "tools are not supported yet")
    if body.functions:
        raise unsupported("functions", "functions are not supported")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool_choice is supported as 'none' and 'auto' only")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")
    limits = (body.max_tokens, body.max_completion_tokens)
    if None not in limits and limits[0] != limits[1]:
        raise bad_request("max_tokens and max_completion_tokens are the same, and differ", "max_tokens")
    if body.echo and not body.continue_final_message:
        raise bad_request("echo needs continue_final_message: it is that message's text", "echo")


class _Call:
    """One call: its request, and how its answer is written."""

    def __init__(self, state: ServerState, body: ChatRequest, prompt: TokenizedPrompt) -> None:
        self._state = state
        self._body = body
        self._prompt = prompt
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._echo = _final_text(body) if body.echo else ""
        self._head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": state.model_name,
            "system_fingerprint": state.llm.system_fingerprint,
        }
        limit = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
        settings = {
            **state.llm.recommended_sampling(),
            **body.sampling_settings(),
            "max_tokens": limit,
            "logprobs": self._top,
        }
        self.ask = Ask(
            prompt=prompt,
            params=SamplingParams(**settings),
            priority=body.priority or 0,
            wants_deltas=bool(body.stream),
        )
        self._entries = num_entries(state, self._top)
        of_prompt = num_entries(state, body.prompt_logprobs)
        self.is_large = bool(self._entries or of_prompt) or (body.n or 1) > MOST_CHOICES
        check_prompt_entries(of_prompt * len(prompt.token_ids), "prompt_logprobs")
        check_output_entries(state, [self.ask], "top_logprobs")
        if limit is not None:
            name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            check_room(state, [prompt], limit, name)

    def answer(self, output: RequestOutput) -> Parts:
        """The whole answer. Slow where it holds log-probabilities."""
        members = {"choices": list_of(self._choice(one) for one in output.outputs)}
        members |= self._of_prompt(output.prompt_logprobs)
        return with_members({**self._head, "usage": usage_of([output])}, members)

    def _choice(self, one: CompletionOutput) -> Parts:
        choice: dict[str, Any] = {
            "index": one.index,
            "message": {"role": "assistant", "content": self._echo + one.text, "refusal": None},
            "finish_reason": finish_reason(one),
            "stop_reason": one.stop_reason,
            "seed": one.seed,
        }
        return self._with_tokens(choice, one)

    def _with_tokens(self, choice: dict[str, Any], piece: CompletionOutput | CompletionDelta) -> Parts:
        """A choice with its tokens' log-probabilities and ids, as far as they are wanted."""
        if self._body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        if self._top is None:
            choice["logprobs"] = None
            return with_members(choice, {})
        as_ids = bool(self._body.return_tokens_as_token_ids)
        content = chat_logprobs(piece.logprobs or (), self._top, self._state.llm.tokenizer, as_ids)
        return with_members(choice, {"logprobs": with_members({}, {"content": content})})

    async def events(self, stream: Stream) -> AsyncGenerator[bytes, None]:
        """The answer's pieces as they come."""
        body = self._body
        num_prompt, num_output = len(self._prompt.token_ids), 0
        begun: set[int] = set()
        try:
            async for deltas in stream.deltas():
                written = bytearray()
                for delta in deltas:
                    num_output += len(delta.token_ids)
                    used = usage(num_prompt, num_output, 0) if body.continuous_usage else None
                    first = delta.index not in begun
                    begun.add(delta.index)
                    written += await self._events_of(delta, used, first)
                    if len(written) >= MOST_AT_ONCE:
                        yield bytes(written)
                        written.clear()
                if written:
                    yield bytes(written)
            if body.include_usage:
                cached = stream.output.num_cached_tokens if stream.output else 0
                total = usage(num_prompt, num_output, cached)
                yield event({**self._head, "choices": [], "usage": total})
            yield DONE
        finally:
            self._state.engine.abort([stream])

    async def _events_of(self, delta: CompletionDelta, used: dict[str, Any] | None, first: bool) -> bytes:
        """The chunks that a piece makes."""
        head: dict[str, Any] = self._head if used is None else {**self._head, "usage": used}

        def write() -> bytes:
            written = b""
            if first:
                of_prompt = self._of_prompt(delta.prompt_logprobs)
                written = event_of(with_members({**head, "choices": [self._first(delta)]}, of_prompt))
            return written + event_of(with_members(head, {"choices": list_of([self._next(delta)])}))

        num_entries = len(delta.logprobs or ()) * self._entries
        is_large = num_entries > MOST_IN_LOOP or delta.prompt_logprobs is not None
        return await asyncio.to_thread(write) if is_large else write()

    def _first(self, delta: CompletionDelta) -> dict[str, Any]:
        """The chunk that says who speaks, with the seed that the answer is made with."""
        message = {"role": "assistant", "content": self._echo}
        return {
            "index": delta.index,
            "delta": message,
            "logprobs": None,
            "finish_reason": None,
            "seed": delta.seed,
        }

    def _of_prompt(self, scores: Sequence[PositionLogprobs | None] | None) -> dict[str, Parts]:
        """What an answer, or the chunk before a choice's first token, says about the prompt."""
        members: dict[str, Parts] = {}
        if self._body.return_token_ids:
            members["prompt_token_ids"] = [to_json(list(self._prompt.token_ids))]
        if self._body.prompt_logprobs is not None and scores is not None:
            members["prompt_logprobs"] = prompt_logprobs(scores)
        return members

    def _next(self, delta: CompletionDelta) -> Parts:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return self._with_tokens(choice, delta)


def _final_text(body: ChatRequest) -> str:
    content = body.messages[-1].content
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""
