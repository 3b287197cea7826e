"""``POST /v1/score``."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from loadproof.engine.output import RequestOutput
from loadproof.engine.prompts import TokenizedPrompt
from loadproof.scoring import SCORING_PARAMS, ContinuationScore, ScoreCall, check_mode, scored
from loadproof.server.answers import refusing, results, submit, usage_of
from loadproof.server.async_engine import Ask
from loadproof.server.bounds import check_prompt_entries, check_scored
from loadproof.server.deadline import Deadline
from loadproof.server.json_parts import Parts, PartsResponse, list_of, with_members
from loadproof.server.logprobs import finite
from loadproof.server.routes.documented import GENERATION_ERRORS, errors
from loadproof.server.schemas.scoring import ScoreAnswer, ScoreRequest
from loadproof.server.state import ServerState, new_id, state_of
from loadproof.server.streaming import while_connected

router = APIRouter()


@router.post(
    "/v1/score",
    response_model=None,
    responses={200: {"model": ScoreAnswer}, **errors(*GENERATION_ERRORS)},
    summary="Score continuations of a context",
)
async def create_score(body: ScoreRequest, request: Request) -> Response:
    """How likely each continuation is after the context, and whether it is what greedy decoding gives."""
    state = state_of(request)
    state.check_model(body.model)
    headers = state.check_fields(body)
    deadline = Deadline.of(body.timeout, state.config.request_timeout)
    size = check_scored(state, body.context, body.continuations)
    call, asks = await while_connected(request, state.encoder.run(deadline, size, _prepare, state, body))
    with refusing(body, "context"):
        streams = submit(state, asks, deadline, "continuations")
    outputs = await while_connected(request, results(state, streams))
    return PartsResponse(await asyncio.to_thread(_answer, state, call, outputs), headers)


def _prepare(state: ServerState, body: ScoreRequest) -> tuple[ScoreCall, list[Ask]]:
    with refusing(body, "context"):
        check_mode(state.llm)
        call = ScoreCall(state.llm, [body.context], [body.continuations], bool(body.truncate_context))
    entries = 2 * sum(scorable.num_scored for scorable in call.scorables)  # each has an id beside it
    check_prompt_entries(entries, "continuations")
    asks = [
        Ask(
            prompt=TokenizedPrompt(scorable.token_ids.tolist(), None, body.cache_salt),
            params=SCORING_PARAMS,
            priority=body.priority or 0,
        )
        for scorable in call.scorables
    ]
    return call, asks


def _answer(state: ServerState, call: ScoreCall, outputs: list[RequestOutput]) -> Parts:
    pairs = zip(outputs, call.scorables, strict=True)
    (scores,) = call.scores(scored(output, scorable.num_scored) for output, scorable in pairs)
    content = {
        "id": new_id("score"),
        "object": "score",
        "created": int(time.time()),
        "model": state.model_name,
        "usage": usage_of(outputs, 0),
        "system_fingerprint": state.llm.system_fingerprint,
    }
    entries = ([to_json(_entry(index, score))] for index, score in enumerate(scores))
    return with_members(content, {"scores": list_of(entries)})


def _entry(index: int, score: ContinuationScore) -> dict[str, object]:
    return {
        "index": index,
        "logprob": finite(score.logprob),
        "is_greedy": score.is_greedy,
        "num_tokens": score.num_tokens,
        "num_bytes": score.num_bytes,
        "num_dropped": score.num_dropped,
        "token_ids": score.token_ids,
        "token_logprobs": [finite(value) for value in score.token_logprobs],
    }
