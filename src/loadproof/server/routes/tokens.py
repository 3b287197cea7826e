"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from loadproof.server.answers import refusing
from loadproof.server.bounds import check_text
from loadproof.server.chat_prompt import chat_prompt
from loadproof.server.deadline import Deadline
from loadproof.server.errors import bad_request
from loadproof.server.json_parts import Parts, PartsResponse, list_of, run_of, slices, with_members
from loadproof.server.routes.documented import errors
from loadproof.server.schemas.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from loadproof.server.state import ServerState, state_of
from loadproof.server.streaming import while_connected

router = APIRouter()
_STATUSES = (400, 404, 408, 413, 415, 429)


@router.post(
    "/tokenize",
    response_model=None,
    responses={200: {"model": TokenizeAnswer}, **errors(*_STATUSES)},
    summary="Encode a text or a chat",
)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids that a completion of the text, or an answer to the chat, would begin with."""
    state = state_of(request)
    state.check_model(body.model)
    headers = state.check_fields(body)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    deadline = Deadline.of(state.config.request_timeout)
    work = state.encoder.run(deadline, len(await request.body()), _tokens, state, body)
    return PartsResponse(await while_connected(request, work), headers)


def _tokens(state: ServerState, body: TokenizeRequest) -> Parts:
    """The answer, which may hold as many tokens as a text has bytes: not for the event loop."""
    ids = _encode(state, body)
    members = {"tokens": _written(ids)}
    if body.return_token_strs:
        members["token_strs"] = _written([state.llm.tokenizer.id_to_token(id_) or "" for id_ in ids])
    return with_members({"count": len(ids), "max_model_len": state.llm.max_model_len}, members)


def _written(entries: Sequence[object]) -> Parts:
    return list_of([run_of(part)] for part in slices(entries, 1))


def _encode(state: ServerState, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        return list(chat_prompt(state, body).token_ids)
    check_text(state, body.prompt, "prompt")
    with refusing(body, "prompt"):
        return state.llm.tokenizer.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )


@router.post(
    "/detokenize",
    response_model=None,
    responses={200: {"model": DetokenizeAnswer}, **errors(*_STATUSES)},
    summary="Decode token ids",
)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = state_of(request)
    state.check_model(body.model)
    headers = state.check_fields(body)
    if len(body.tokens) > state.llm.max_model_len:
        raise bad_request(
            f"tokens has {len(body.tokens)} entries; max_model_len is {state.llm.max_model_len}",
            "tokens",
            "context_length_exceeded",
        )
    deadline = Deadline.of(state.config.request_timeout)
    work = state.encoder.run(deadline, len(await request.body()), _text, state, body)
    return PartsResponse(await while_connected(request, work), headers)


def _text(state: ServerState, body: DetokenizeRequest) -> Parts:
    vocab_size = state.llm.engine.device.vocab_size
    wrong = next((token_id for token_id in body.tokens if token_id >= vocab_size), None)
    if wrong is not None:
        raise bad_request(f"token id {wrong} is outside the vocabulary of {vocab_size}", "tokens")
    return [to_json({"prompt": state.llm.tokenizer.decode(body.tokens, skip_special_tokens=False)})]


@router.get("/tokenizer_info", response_model=TokenizerInfo, responses=errors(), summary="Special tokens")
async def tokenizer_info(request: Request) -> dict[str, str | None]:
    """The tokens that begin and end a text: lm-evaluation-harness's remote tokenizer asks for them."""
    tokenizer = state_of(request).llm.tokenizer
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {name: None if id_ is None else tokenizer.id_to_token(id_) for name, id_ in ids.items()}
