"""One completion's text and log-probabilities, built token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadproof.engine.output import CompletionDelta, CompletionOutput, PositionLogprobs, position_logprobs
from loadproof.engine.prompt_logprobs import PromptLogprobs
from loadproof.engine.request import FinishReason, Request
from loadproof.engine.sampling_params import MAX_TOKENS
from loadproof.tokenizer.incremental import IncrementalDecoder
from loadproof.tokenizer.stop import StopChecker

if TYPE_CHECKING:
    from loadproof.devices.device import RowLogprobs
    from loadproof.tokenizer.tokenizer import Tokenizer

Finish = tuple[FinishReason, int | str | None]


class Completion:
    """Follows a request's tokens: their text, what stop strings cut from it, and their log-probabilities.

    Text is final once given out. A stop string counts only in text that tokens after the first
    ``min_tokens`` bring.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request = request
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(
            tokenizer, skip_special_tokens=params.skip_special_tokens, continuation=True
        )
        self._stops = StopChecker(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self._include_stop = params.include_stop_str_in_output
        self._num_unstoppable = params.min_tokens if params.stop else MAX_TOKENS
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []

    def push(self, row: RowLogprobs | None) -> tuple[str, Finish | None]:
        """Take in the request's newest token; its new text and, where it ends the request, how."""
        token_id = self.request.output_token_ids[-1]
        assert self._num_tokens + 1 == len(self.request.output_token_ids), "a token was left out"
        if self._logprobs is not None:
            assert row is not None
            self._logprobs.append(self._position(token_id, row))
        finish: Finish | None = self.request.token_finish()
        if finish is None:
            text = self._show(self._decoder.push(token_id))
        else:
            text = self._end(token_id, shown=finish[0] != "stop" or self._include_stop)
        if self._stops.stopped is not None:
            finish = ("stop", self._stops.stopped)
        self._pieces.append(text)
        self._num_tokens += 1
        return text, finish

    def rewind(self) -> None:
        """Take back the request's tokens that never got here: they are sampled again, the same."""
        del self.request.output_token_ids[self._num_tokens :]
        if self._logprobs is not None:
            del self._logprobs[self._num_tokens :]

    def abort(self) -> str:
        """End the text where it stands; returns what was held back and may be shown now."""
        self.rewind()  # a token of a step whose results are being handed out may not have got here
        text = self._stops.push(self._decoder.finish()) + self._stops.finish()
        self._pieces.append(text)
        return text

    def delta(self, text: str, num_tokens: int) -> CompletionDelta:
        """The piece that the newest ``num_tokens`` tokens made; the request is up to date with them."""
        request = self.request
        first_new = len(request.output_token_ids) - num_tokens
        return CompletionDelta(
            request.request_id,
            request.index,
            text,
            request.output_token_ids[first_new:],
            None if self._logprobs is None else self._logprobs[first_new:],
            request.finish_reason,
            request.stop_reason,
            request.seed,
            self.prompt_logprobs() if first_new == 0 and num_tokens else None,
        )

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt, once all of them are there, if the request wanted any."""
        scores = self.request.prompt_scores
        if scores is None or not scores.done:
            return None
        return PromptLogprobs(scores, self._text_of)

    def output(self) -> CompletionOutput:
        """The completion so far, whole once its request has finished."""
        request = self.request
        return CompletionOutput(
            request.index,
            "".join(self._pieces),
            request.output_token_ids,
            self._logprobs,
            self._cumulative_logprob(),
            request.finish_reason,
            request.stop_reason,
            request.seed,
        )

    def _end(self, token_id: int, *, shown: bool) -> str:
        """The last token's text, where it is shown, and all that was held back."""
        text = self._show(self._decoder.push(token_id)) if shown else ""
        return text + self._show(self._decoder.finish()) + self._stops.finish()

    def _show(self, piece: str) -> str:
        # The newest token is already counted, so it may end the text if it is number min_tokens + 1 or later.
        if len(self.request.output_token_ids) <= self._num_unstoppable:
            return piece
        return self._stops.push(piece)

    def _cumulative_logprob(self) -> float | None:
        if self._logprobs is None:
            return None
        chosen = zip(self._logprobs, self.request.output_token_ids, strict=True)
        return sum(position[token_id].logprob for position, token_id in chosen)

    def _position(self, token_id: int, row: RowLogprobs) -> PositionLogprobs:
        best = zip(row.top_ids.tolist(), row.top_logprobs.tolist(), strict=True)
        return position_logprobs(token_id, row.token_logprob, row.token_rank, best, self._text_of)

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
