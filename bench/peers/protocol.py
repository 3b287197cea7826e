"""How a driver talks to the comparison: one JSON object a line, requests on stdin, answers on stdout.

A driver is a program that runs in its engine's own environment, so this file needs the standard library
only. It loads its engine, answers ``{"version": ...}``, then each request ``{"prompts": [[id, ...], ...],
"output_len": n}`` with ``{"seconds": ..., "output_tokens": ...}``, until stdin ends. A request may hold
``"prompt_logprobs": k``, for the log-probabilities of the prompts' tokens and of the k best. With
``--first-token`` it completes one short prompt by one token instead, answers once, and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

FIRST_TOKEN_PROMPT = [504, 9575, 314, 260, 2240, 5031, 314, 253]


@dataclass(frozen=True)
class Answer:
    """Wall-clock seconds of a whole request, and how many tokens it produced over all prompts."""

    seconds: float
    output_tokens: int


@dataclass(frozen=True)
class Served:
    """A loaded engine: ``complete(prompts, output_len)`` is greedy and never stops early.

    ``score(prompts, prompt_logprobs)`` makes one token each, and the prompts' log-probabilities.
    """

    version: str
    complete: Callable[[list[list[int]], int], Answer]
    score: Callable[[list[list[int]], int], Answer] | None = None


def run(load: Callable[[str], Served]) -> None:
    """Be a driver: ``load`` gets the program's one argument, a model or the peers' directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("place")
    parser.add_argument("--first-token", action="store_true")
    options = parser.parse_args()
    answers = _answers()

    def reply(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    served = load(options.place)
    if options.first_token:
        reply(**asdict(served.complete([FIRST_TOKEN_PROMPT], 1)))
        return
    reply(version=served.version)
    for line in sys.stdin:
        request = json.loads(line)
        if "prompt_logprobs" in request:
            assert served.score is not None, "this engine has no log-probabilities of prompts"
            answer = served.score(request["prompts"], request["prompt_logprobs"])
        else:
            answer = served.complete(request["prompts"], request["output_len"])
        reply(**asdict(answer))


def _answers() -> Any:
    """The real stdout; what libraries print goes to stderr from here on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
