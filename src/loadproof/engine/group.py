"""A caller's request, as the engine follows it: its completions, and whom to tell about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadproof.engine.completion import Completion
from loadproof.engine.output import CompletionDelta, RequestOutput
from loadproof.engine.request import FinishReason


@dataclass(eq=False, slots=True)
class Group:
    """The ``n`` completions of one prompt; listeners are None where nobody wants to be told."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    on_start: Callable[[], None] | None
    on_delta: Callable[[CompletionDelta], None] | None
    on_output: Callable[[RequestOutput], None] | None
    ending: FinishReason | None = None  # from when on it is being cut off, for that reason

    @property
    def finished(self) -> bool:
        """Whether all completions are at their end."""
        return all(completion.request.finished for completion in self.completions)

    def tell_start(self) -> None:
        """Tell the listener, once, that the first completion runs; if it fails, the request is to end."""
        on_start, self.on_start = self.on_start, None
        if on_start is None:
            return
        try:
            on_start()
        except BaseException:
            self.ending = "error"
            raise

    def output(self) -> RequestOutput:
        """What is handed out of a request that has finished."""
        outputs = [completion.output() for completion in self.completions]
        first = self.completions[0]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            first.request.num_cached_tokens or 0,
            True,
            first.prompt_logprobs(),
        )
