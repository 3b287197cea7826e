"""``POST /v1/score``."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from loadproof.engine.output import RequestOutput
from loadproof.engine.prompts import TokenizedPrompt
from loadproof.scoring import SCORING_PARAMS, ContinuationScore, ScoreCall, check_mode, scored
from loadproof.server.answers import refusing, results, submit, usage_of
from loadproof.server.async_engine import Ask
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
    call = await asyncio.to_thread(_prepare, state, body)
    asks = [
        Ask(
            prompt=TokenizedPrompt(scorable.token_ids.tolist(), None, body.cache_salt),
            params=SCORING_PARAMS,
            priority=body.priority or 0,
        )
        for scorable in call.scorables
    ]
    with refusing(body, "context"):
        streams = submit(state, asks, body.timeout)
    outputs = await while_connected(request, results(state, streams))
    (scores,) = await asyncio.to_thread(_scores, call, outputs)
    return JSONResponse(_answer(state, scores, outputs), headers=headers)


def _prepare(state: ServerState, body: ScoreRequest) -> ScoreCall:
    with refusing(body, "context"):
        check_mode(state.llm)
        return ScoreCall(state.llm, [body.context], [body.continuations], body.truncate_context)


def _scores(call: ScoreCall, outputs: list[RequestOutput]) -> list[list[ContinuationScore]]:
    pairs = zip(outputs, call.scorables, strict=True)
    return call.scores(scored(output, scorable.num_scored) for output, scorable in pairs)


def _answer(
    state: ServerState, scores: list[ContinuationScore], outputs: list[RequestOutput]
) -> dict[str, object]:
    return {
        "id": new_id("score"),
        "object": "score",
        "created": int(time.time()),
        "model": state.model_name,
        "scores": [
            {
                "index": index,
                "logprob": finite(score.logprob),
                "is_greedy": score.is_greedy,
                "num_tokens": score.num_tokens,
                "num_bytes": score.num_bytes,
                "num_dropped": score.num_dropped,
                "token_ids": score.token_ids,
                "token_logprobs": [finite(value) for value in score.token_logprobs],
            }
            for index, score in enumerate(scores)
        ],
        "usage": usage_of(outputs, 0),
        "system_fingerprint": state.llm.system_fingerprint,
    }
