"""The Python interface: :class:`LLM`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from loadproof.config import EngineConfig
from loadproof.engine.admission import ClosedError, RequestError
from loadproof.engine.chats import Conversation, TemplateOptions, conversations, template_options
from loadproof.engine.engine import Engine, LogitsHook
from loadproof.engine.loader import load_model
from loadproof.engine.output import CompletionDelta, RequestOutput
from loadproof.engine.progress import Progress, progress_bar
from loadproof.engine.prompts import Prompt, TokenizedPrompt, naming, tokenize_prompt, tokenize_prompts
from loadproof.engine.recommended import recommended_sampling
from loadproof.engine.sampling_params import SamplingParams
from loadproof.perplexity import TextScore, score_texts
from loadproof.scoring import ContinuationScore, Text, is_one, score

if TYPE_CHECKING:
    from loadproof.engine.request import FinishReason
    from loadproof.tokenizer.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


class InterruptedCallError(RuntimeError):
    """A call whose requests were lost: the thread that made a step for them was interrupted, or failed."""

    def __init__(self) -> None:
        super().__init__(
            "another thread was interrupted in a step that it made for this call too; call again"
        )


class LLM:
    """A model loaded for use from Python; the names follow vLLM's.

    ``model`` is a directory, a ``.gguf`` file, a hub id or an alias; ``settings`` are the fields of
    :class:`~loadproof.config.EngineConfig`. Raises a ``ValueError`` subclass for a model or a setting that
    can't be used. Use it as a context manager, or call :meth:`close`. Several threads may call it: their
    requests are computed together, and what each gets is what it would get alone. Where one of them is
    interrupted in a step, another's call may raise :class:`InterruptedCallError`, and can be made again.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self.config = EngineConfig.of(os.fspath(model) if isinstance(model, os.PathLike) else model, settings)
        loaded = load_model(self.config)
        self.model_name = loaded.name
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.engine = Engine(
            loaded.device,
            loaded.tokenizer,
            seed=self.config.seed,
            max_logprobs=self.config.max_logprobs,
            scheduling=self.config.scheduler_options(),
            pipeline=self.config.pipeline_options(),
        )
        self._generation_config = loaded.generation_config

    @property
    def system_fingerprint(self) -> str:
        """What outputs may depend on besides the request: weights, numeric format, kernels, ISA level."""
        return self.engine.device.fingerprint

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.engine.device.limits.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's ``generation_config`` recommends, and defaults for the rest."""
        return SamplingParams(**self.recommended_sampling())

    def recommended_sampling(self) -> dict[str, Any]:
        """The sampling parameters that the model's ``generation_config`` sets."""
        return recommended_sampling(self._generation_config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts together; outputs in the prompts' order, the same as if each had been alone.

        A prompt is text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; ids are integers,
        or an integer array of NumPy's. An object may hold a ``cache_salt`` as well: only prompts of one salt
        share cached prefixes. Parameters are one set for all or one a prompt; None takes
        :meth:`get_default_sampling_params`. ``priority`` is one integer a prompt, the least first, for the
        scheduling policy of that name. ``use_tqdm`` shows progress on standard error if that is a
        terminal. Raises ``ValueError``, naming the prompt by its number where there are several, before
        anything is computed where a prompt or its parameters can't be served.
        """
        return self._run(tokenize_prompts(prompts, self.tokenizer), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's chat template.

        A conversation is a list of ``{"role": ..., "content": ...}``. ``options`` go to
        :meth:`Tokenizer.apply_chat_template`: ``add_generation_prompt``, ``continue_final_message`` and
        ``tools``; ``chat_template_kwargs`` are the template's own variables. Otherwise as :meth:`generate`.
        """
        chats = conversations(messages)
        known = template_options(options, chat_template_kwargs)
        prompts = []
        for index, chat in enumerate(chats):
            with naming(index, len(chats)):
                prompts.append(self._chat_prompt(chat, known))
        return self._run(prompts, sampling_params, use_tqdm, priority)

    def chat_prompt(
        self,
        conversation: Conversation,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> TokenizedPrompt:
        """The prompt that :meth:`chat` makes of a conversation."""
        return self._chat_prompt(conversation, template_options(options, chat_template_kwargs))

    def _chat_prompt(self, conversation: Conversation, options: Mapping[str, Any]) -> TokenizedPrompt:
        text = self.tokenizer.apply_chat_template(conversation, **options)
        return TokenizedPrompt(self.tokenizer.encode(text, add_special_tokens=False), text)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[CompletionDelta, None, None]:
        """Complete one prompt piece by piece, from the first piece asked for on.

        That one raises ``ValueError`` where the prompt can't be served. Closing or dropping the iterator
        early aborts the request. Other calls may be made in between: the pieces wait.
        """
        tokenized = tokenize_prompt(prompt, self.tokenizer)
        (params,) = self._params(sampling_params, 1)
        deltas: deque[CompletionDelta] = deque()
        unfinished = params.n
        request_id = self.engine.new_request_id()
        try:
            with naming(0, 1):
                self.engine.add_request(
                    tokenized.token_ids,
                    params,
                    prompt=tokenized.text,
                    request_id=request_id,
                    cache_salt=tokenized.cache_salt,
                    on_delta=deltas.append,
                )
            while unfinished:
                self._step_until(lambda: bool(deltas))
                delta = deltas.popleft()
                unfinished -= delta.finish_reason is not None
                yield delta
                self._check_whole(delta.finish_reason)
        finally:
            self.engine.leave((request_id,))
            self.engine.abort_when_free()  # it never waits: the collector of garbage may close this anywhere

    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        context: Text,
        continuations: Sequence[Text],
        *,
        truncate_context: bool = False,
        use_tqdm: bool = True,
    ) -> list[ContinuationScore]: ...
    @overload
    def score(
        self,
        context: Sequence[Text],
        continuations: Sequence[Sequence[Text]],
        *,
        truncate_context: bool = False,
        use_tqdm: bool = True,
    ) -> list[list[ContinuationScore]]: ...
    def score(
        self, context: Any, continuations: Any, *, truncate_context: bool = False, use_tqdm: bool = True
    ) -> list[ContinuationScore] | list[list[ContinuationScore]]:
        """How likely each continuation is after the context, or each list's after its own context.

        Both are text or token ids. Texts are joined before they are encoded, white space at the context's
        end counts as the continuation's, and an empty context is the model's BOS (or else end-of-text)
        token: as lm-evaluation-harness does. All is computed together, shared beginnings once. Raises
        ``ValueError``, naming the context by its number, before anything is computed where a pair can't be
        scored; ``truncate_context`` cuts contexts that are too long from the left instead.
        """
        if is_one(context):
            return score(self, [context], [continuations], truncate_context, use_tqdm)[0]
        return score(self, context, continuations, truncate_context, use_tqdm)

    def score_texts(
        self,
        texts: Sequence[str],
        *,
        window: int | None = None,
        stride: int | None = None,
        use_tqdm: bool = True,
    ) -> list[TextScore]:
        """How likely each whole text is, from its first token on, which follows the model's BOS token.

        A text longer than ``window`` tokens (``max_model_len - 1`` where None) is scored ``stride`` tokens
        at a time, each time after the ``window - stride`` before them. None takes the largest stride,
        ``window - 1``, as lm-evaluation-harness does: least work, and least context. Raises ``ValueError``
        as :meth:`score` does, for an empty text too.
        """
        return score_texts(self, texts, window, stride, use_tqdm)

    def on_logits(self, hook: LogitsHook | None) -> None:
        """Have ``hook(request_id, index, position, logits)`` called for each token that is sampled.

        ``logits`` is the raw float32 row ``[vocab_size]`` and ``position`` the sampled token's. For
        exactness tests and tools: it costs a copy of the logits. None removes the hook. An error in it ends
        the call whose step it was; the hook itself may neither generate nor close.
        """
        self.engine.on_logits = hook

    def stats(self) -> dict[str, int]:
        """The engine's counters, by name."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, those that running requests compute included; always true."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model's memory and threads; safe to call again.

        Calls that other threads are making end with ``ValueError``.
        """
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: list[TokenizedPrompt],
        params: Params,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        request_ids: list[str] = []
        each = self._params(params, len(prompts))
        ranks = _priorities(priority, len(prompts))
        try:
            with progress_bar(len(prompts), show=use_tqdm) as progress:
                receive = _receiver(outputs, progress)
                with self.engine.exclusive():  # no step of another thread's before all are known to be served
                    for index, (prompt, one, rank) in enumerate(zip(prompts, each, ranks, strict=True)):
                        with naming(index, len(prompts)):
                            request_ids.append(self.engine.new_request_id())
                            self._add(request_ids[-1], prompt, one, rank, receive)
                self._step_until(lambda: len(outputs) == len(request_ids))
            for output in outputs.values():
                for completion in output.outputs:
                    self._check_whole(completion.finish_reason)
            return [outputs[request_id] for request_id in request_ids]
        finally:
            # After an error or an interrupt nothing of this call stays behind, whatever else interrupts this.
            self.engine.leave(request_ids)
            self.engine.abort_when_free()

    def _add(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        receive: Callable[[RequestOutput], None],
    ) -> None:
        self.engine.add_request(
            prompt.token_ids,
            params,
            prompt=prompt.text,
            request_id=request_id,
            priority=priority,
            cache_salt=prompt.cache_salt,
            on_output=receive,
        )

    def _step_until(self, done: Callable[[], bool]) -> None:
        """Move all requests on until ``done``, which the steps of other threads may bring about too."""
        while not done():
            with self.engine.exclusive():
                is_working = self.engine.has_unfinished()  # first: it may bring that about by what it ends
                if done():
                    return
                if not is_working:
                    raise InterruptedCallError
                self.engine.step()

    def _check_whole(self, reason: FinishReason | None) -> None:
        """Refuse what ended because the model was closed, or a step failed; an abort somebody asked for."""
        if reason == "abort" and self.engine.closed:
            raise ClosedError("the model was closed while this call was being served")
        if reason == "error":
            raise InterruptedCallError

    def _params(self, params: Params, count: int) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        return _one_each(params, count)


def _one_each(params: object, count: int) -> Sequence[SamplingParams]:
    if not isinstance(params, (list, tuple)):
        kind = type(params).__name__
        raise RequestError(f"sampling_params is a SamplingParams or a list of them, not {kind}")
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params[{index}] is a SamplingParams, not {type(one).__name__}")
    if len(params) != count:
        raise RequestError(f"{count} prompts and {len(params)} sampling parameters")
    return params


def _priorities(priority: object, count: int) -> Sequence[int]:
    if priority is None:
        return [0] * count
    if not isinstance(priority, (list, tuple)) or len(priority) != count:
        raise RequestError(f"priority is a list of {count} integers, one a prompt, not {priority!r:.200}")
    return priority


def _receiver(outputs: dict[str, RequestOutput], progress: Progress) -> Callable[[RequestOutput], None]:
    def receive(output: RequestOutput) -> None:
        outputs[output.request_id] = output
        progress.advance(sum(len(completion.token_ids) for completion in output.outputs))

    return receive
