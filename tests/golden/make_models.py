"""Write ``models/*/golden.npz``: transformers' answers of each small model in ``tiny_models.py``.

Needs torch, transformers and ml-dtypes; nothing is downloaded. Run from the repository:

    PYTHONPATH=src:. python tests/golden/make_models.py [name ...]

The prompts are chosen, from a fixed sequence of random ones, so that a greedy continuation is a fair test:
each step's best token leads the second best by more than bfloat16 arithmetic moves any logit of that step in
transformers' own bfloat16 model, and the continuation is not one token again and again.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
import transformers  # type: ignore[import-not-found, unused-ignore]
from tests.tiny_models import TINY, TinyModel

LENGTHS = (2, 13, 33)  # of the prompts; the windows are 8
NUM_GREEDY = 16
BATCH = 256
MAX_BATCHES = 64
MIN_LEAD = 0.05  # of the logits' standard deviation
MIN_LEAD_OVER_ERROR = 1.6  # of the largest error of any logit in that step
MIN_DISTINCT = 8


def load(model: TinyModel, dtype: torch.dtype) -> Any:
    """The model as transformers has it, with our weights."""
    config_class = transformers.CONFIG_MAPPING[model.config["model_type"]]
    config = config_class.from_dict({**model.config, "dtype": "float32"})
    theirs = getattr(transformers, model.config["architectures"][0])._from_config(
        config, attn_implementation="eager"
    )
    ours = {name: torch.from_numpy(model.source.read(name).astype(np.float32)) for name in model.graph.params}
    missing, unexpected = theirs.load_state_dict(ours, strict=False)
    tied = {"lm_head.weight"} if "lm_head.weight" not in ours else set()
    if set(missing) - tied or unexpected:
        raise SystemExit(f"{model.name}: {missing} missing, {unexpected} unexpected")
    theirs.tie_weights()
    return theirs.eval().to(dtype)


def logits_of(theirs: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[batch, T, vocab]``; transformers' Gemma 3 has the scores' softcap but must be handed it."""
    softcap = getattr(theirs.config, "attn_logit_softcapping", None)
    extra = {} if softcap is None else {"softcap": softcap}
    result: torch.Tensor = theirs(tokens, use_cache=False, **extra).logits.float()
    return result


def continuations(theirs: Any, prompts: torch.Tensor) -> torch.Tensor:
    """Prompts ``[batch, T]`` with ``NUM_GREEDY`` greedy tokens behind each."""
    for _ in range(NUM_GREEDY):
        best = logits_of(theirs, prompts)[:, -1].argmax(-1, keepdim=True)
        prompts = torch.cat([prompts, best], 1)
    return prompts


def choose(exact: Any, rounded: Any, length: int, vocab_size: int) -> tuple[torch.Tensor, float, float]:
    """The first candidate that is a fair test, and its smallest lead, alone and over the rounding."""
    random = torch.Generator().manual_seed(length)
    for _ in range(MAX_BATCHES):
        prompts = torch.randint(2, vocab_size, (BATCH, length), generator=random)
        tokens = continuations(exact, prompts)
        logits = logits_of(exact, tokens[:, :-1])[:, length - 1 :]
        error = (logits_of(rounded, tokens[:, :-1])[:, length - 1 :] - logits).abs().amax(2)
        top = logits.topk(2).values
        lead = top[..., 0] - top[..., 1]
        fair = (lead.amin(1) > MIN_LEAD * logits.std()) & ((lead / error).amin(1) > MIN_LEAD_OVER_ERROR)
        for i in fair.nonzero().flatten().tolist():
            answer = tokens[i, length:]
            if len(answer.unique()) >= MIN_DISTINCT and answer.min() > 1:
                return tokens[i], float(lead[i].min()), float((lead / error)[i].min())
    raise SystemExit(f"no fair prompt of {length} tokens")


def make(model: TinyModel) -> None:
    """Write one model's goldens and print what they look like."""
    exact, rounded = load(model, torch.float32), load(model, torch.bfloat16)
    arrays: dict[str, Any] = {}
    for i, length in enumerate(LENGTHS):
        tokens, lead, over = choose(exact, rounded, length, model.graph.vocab_size)
        prompt, answer = tokens[:length], tokens[length:]
        logits = logits_of(exact, prompt[None])[0].numpy()
        arrays[f"prompt{i}"] = prompt.numpy().astype(np.int32)
        arrays[f"greedy{i}"] = answer.numpy().astype(np.int32)
        arrays[f"logits{i}"] = logits
        print(f"{model.name}: lead {lead:.2f} = {over:.1f} errors, deviation {logits.std():.1f}")
        print("   ", answer.tolist(), flush=True)
    np.savez_compressed(model.directory / "golden.npz", **arrays)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        for name in sys.argv[1:] or TINY:
            make(TINY[name])
