"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from loadproof.engine.output import CompletionDelta, CompletionOutput, RequestOutput
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
from loadproof.server.chat_prompt import chat_prompt
from loadproof.server.errors import bad_request, unsupported
from loadproof.server.logprobs import chat_logprobs, prompt_logprobs
from loadproof.server.routes.documented import GENERATION_ERRORS, errors, streamed
from loadproof.server.schemas.chat import ChatAnswer, ChatRequest
from loadproof.server.state import ServerState, new_id, state_of
from loadproof.server.stream import Stream
from loadproof.server.streaming import DONE, EventStream, event, while_connected

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
    prompt = await asyncio.to_thread(chat_prompt, state, body)
    with refusing(body, "messages", {"logprobs": "top_logprobs"}):
        call = _Call(state, body, prompt)
        streams = submit(state, [call.ask], body.timeout)
    if body.stream:
        return EventStream(call.events(streams[0]), headers)
    (output,) = await while_connected(request, results(state, streams))
    return JSONResponse(call.answer(output), headers=headers)


def _check(body: ChatRequest) -> None:
    body.check_streaming()
    check_text_format(body.response_format)
    if body.tools:
        raise unsupported("tools", "tools are not supported yet")
    if body.functions:
        raise unsupported("functions", "functions are not supported")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool_choice is supported as 'none' and 'auto' only")
    if body.top_logprobs is not None and not body.logprobs:
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

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """The whole answer."""
        answer: dict[str, Any] = {
            **self._head,
            "choices": [self._choice(one) for one in output.outputs],
            "usage": usage_of([output]),
        }
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(output.prompt_token_ids)
        return answer

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "message": {"role": "assistant", "content": self._echo + one.text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish_reason(one),
            "stop_reason": one.stop_reason,
            "seed": one.seed,
        }
        if self._top is not None:
            choice["logprobs"] = self._logprobs(one)
        if self._body.return_token_ids:
            choice["token_ids"] = list(one.token_ids)
        return choice

    def _logprobs(self, piece: CompletionOutput | CompletionDelta) -> dict[str, Any]:
        assert self._top is not None
        positions = piece.logprobs or ()
        return {"content": chat_logprobs(positions, self._top, self._state.llm.tokenizer)}

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
                    if delta.index not in begun:
                        begun.add(delta.index)
                        written += self._chunk(self._first(delta), used, self._of_prompt(delta))
                    written += self._chunk(self._next(delta), used)
                yield bytes(written)
            if body.include_usage:
                cached = stream.output.num_cached_tokens if stream.output else 0
                total = usage(num_prompt, num_output, cached)
                yield event({**self._head, "choices": [], "usage": total})
            yield DONE
        finally:
            self._state.engine.abort([stream])

    def _chunk(
        self, choice: dict[str, Any], used: dict[str, Any] | None, extra: dict[str, Any] | None = None
    ) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": [choice], **(extra or {})}
        if used is not None:
            chunk["usage"] = used
        return event(chunk)

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

    def _of_prompt(self, delta: CompletionDelta) -> dict[str, Any]:
        """What the chunk before a choice's first token says about the prompt."""
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs)
        return extra

    def _next(self, delta: CompletionDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": None if self._top is None else self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice


def _final_text(body: ChatRequest) -> str:
    content = body.messages[-1].content
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""
