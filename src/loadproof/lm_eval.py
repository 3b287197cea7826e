"""Evaluations of lm-evaluation-harness on the in-process engine: its model ``loadproof``.

The harness finds models whose modules were imported before it looks for them. In Python, import this module
and then name the model, or hand a :class:`LoadproofLM` to ``lm_eval.simple_evaluate``. The harness's own
command line, with this model there: ``python -m loadproof.lm_eval run --model loadproof --model_args
pretrained=smollm2-135m --tasks ...``. Needs ``pip install 'loadproof[lm-eval]'``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar

from loadproof.engine.progress import progress_bar
from loadproof.engine.prompts import TokenizedPrompt
from loadproof.engine.sampling_params import SamplingParams
from loadproof.llm import LLM
from loadproof.scoring import encode_texts, prefix_token

try:
    import lm_eval.models  # noqa: F401  the harness registers its own models only while it knows none
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(f"{error}: needs lm-evaluation-harness, pip install 'loadproof[lm-eval]'") from error

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# The harness's names for the most tokens to generate, the first that is given counts.
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")


class Instance(Protocol):
    """The harness's request, as far as it matters here."""

    @property
    def args(self) -> tuple[Any, ...]:
        """What is asked: two texts, one text, or a text and generation options."""


@register_model("loadproof")
class LoadproofLM(LM):  # type: ignore[misc]  # untyped
    """A model for lm-evaluation-harness.

    ``pretrained`` is whatever :class:`~loadproof.llm.LLM` takes for a model, ``settings`` are the engine's,
    ``max_length`` is the harness's name for ``max_model_len``. ``batch_size`` requests are handed to the
    engine at a time; "auto" hands it ``max_batch_size``, or all. The answers are the same. Raises
    ``ValueError`` for what can't be used.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str],
        *,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 1234,
        **settings: Any,
    ) -> None:
        super().__init__()
        if device not in (None, "cpu"):  # the harness names a GPU unless it is told otherwise
            _logger.info("device %r is ignored: the engine computes on the CPU", device)
        if max_length is not None:
            settings.setdefault("max_model_len", max_length)
        self._batch_size = _batch_size(batch_size, max_batch_size)
        self._max_gen_toks = _positive("max_gen_toks", max_gen_toks)
        self.llm = LLM(pretrained, seed=seed, **settings)

    @property
    def max_length(self) -> int:
        """Most tokens of a request."""
        return self.llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """Names the model in the harness's cache of requests."""
        return self.llm.model_name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Nothing to record: the model's own template is applied here. Raises for the name of another."""
        if isinstance(chat_template, str) and chat_template != "default":
            raise ValueError(f"chat template {chat_template!r}: only the model's default one is supported")
        return "" if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a chat; without a generation prompt its last message is left open."""
        return self.llm.tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def get_model_info(self) -> dict[str, Any]:
        """What the harness records about the model beside the scores."""
        return {"model_name": self.llm.model_name, "system_fingerprint": self.llm.system_fingerprint}

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """For each (context, continuation) its log-likelihood, and whether it is greedy.

        A context that is too long is cut from the left.
        """

        def score(batch: Sequence[Instance], use_tqdm: bool) -> list[tuple[float, bool]]:
            grouped = [(context, list(same)) for context, same in groupby(batch, lambda one: one.args[0])]
            found = self.llm.score(
                [context for context, _ in grouped],
                [[request.args[1] for request in same] for _, same in grouped],
                truncate_context=True,
                use_tqdm=use_tqdm,
            )
            scores = [score for each in found for score in each]
            _warn_if_cut(sum(score.num_dropped > 0 for score in scores), len(batch))
            return [(score.logprob, score.is_greedy) for score in scores]

        return self._answers("loglikelihood", requests, score, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows that overlap by one token."""

        def score(batch: Sequence[Instance], use_tqdm: bool) -> list[float]:
            texts = [request.args[0] for request in batch]
            found = iter(self.llm.score_texts([text for text in texts if text], use_tqdm=use_tqdm))
            return [next(found).logprob if text else 0.0 for text in texts]

        return self._answers("loglikelihood_rolling", requests, score, disable_tqdm)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The completion of each context, up to the first of its stop strings.

        A context that leaves too little room for the tokens asked for is cut from the left.
        """

        def complete(batch: Sequence[Instance], use_tqdm: bool) -> list[str]:
            params = [self._params(request.args[1]) for request in batch]
            contexts = encode_texts(self.llm.tokenizer, [request.args[0] for request in batch])
            prompts = [self._fitted(ids, one) for ids, one in zip(contexts, params, strict=True)]
            _warn_if_cut(
                sum(len(ids) > len(kept.token_ids) for ids, kept in zip(contexts, prompts, strict=True)),
                len(batch),
            )
            return [
                output.outputs[0].text for output in self.llm.generate(prompts, params, use_tqdm=use_tqdm)
            ]

        return self._answers("generate_until", requests, complete, disable_tqdm)

    def _answers(
        self,
        kind: str,
        requests: Sequence[Instance],
        answer: Callable[[Sequence[Instance], bool], list[_T]],
        disable_tqdm: bool,
    ) -> list[_T]:
        """Answers batch by batch, each kept in the harness's cache at once."""
        size = self._batch_size or max(len(requests), 1)
        is_one = len(requests) <= size
        answers: list[_T] = []
        with progress_bar(len(requests), show=not (disable_tqdm or is_one)) as progress:
            for start in range(0, len(requests), size):
                batch = requests[start : start + size]
                for request, found in zip(batch, answer(batch, is_one and not disable_tqdm), strict=True):
                    answers.append(found)
                    self.cache_hook.add_partial(kind, request.args, found)
                    progress.advance(0)
        return answers

    def _fitted(self, token_ids: list[int], params: SamplingParams) -> TokenizedPrompt:
        token_ids = token_ids or [prefix_token(self.llm.tokenizer)]
        assert params.max_tokens is not None
        return TokenizedPrompt(token_ids[-max(1, self.max_length - params.max_tokens) :], None)

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters from the harness's generation options: greedy unless they say otherwise."""
        given = {name: value for name, value in options.items() if value is not None}
        limits = [given.pop(name) for name in _MAX_TOKENS if name in given]
        until = given.pop("until", [])
        temperature = float(given.pop("temperature", 1.0 if given.get("do_sample") else 0.0))
        if given.pop("do_sample", True) is False:
            temperature = 0.0
        unknown = sorted(given.keys() - set(_SAMPLING))
        if unknown:
            raise ValueError(f"generation options that are not supported: {', '.join(unknown)}")
        return SamplingParams(
            temperature=temperature,
            max_tokens=min(int(limits[0]) if limits else self._max_gen_toks, self.max_length - 1),
            stop=[text for text in ([until] if isinstance(until, str) else until) if text],
            skip_special_tokens=False,  # a stop string may be the text of one
            **given,
        )


def _batch_size(batch_size: int | str, max_batch_size: int | None) -> int | None:
    """Requests of a batch; None for all."""
    if str(batch_size).partition(":")[0] != "auto":
        return _positive("batch_size", batch_size)
    return None if max_batch_size is None else _positive("max_batch_size", max_batch_size)


def _positive(name: str, value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} is a number from 1 on, not {value!r:.100}")
    return number


def _warn_if_cut(num_cut: int, count: int) -> None:
    if num_cut:
        _logger.warning("%d of %d contexts were too long and cut from the left", num_cut, count)


def main() -> None:
    """The harness's own command line, with this model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
