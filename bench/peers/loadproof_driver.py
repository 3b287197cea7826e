"""Drives loadproof through its Python interface; the argument is a model's name or path."""

from __future__ import annotations

import time

from protocol import Answer, Served, run

from loadproof.engine.sampling_params import SamplingParams
from loadproof.llm import LLM


def load(model: str) -> Served:
    llm = LLM(model, max_num_batched_tokens=2048, max_num_seqs=64)

    def complete(prompts: list[list[int]], output_len: int) -> Answer:
        return generate(prompts, SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True))

    def score(prompts: list[list[int]], prompt_logprobs: int) -> Answer:
        return generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=prompt_logprobs)
        )

    def generate(prompts: list[list[int]], params: SamplingParams) -> Answer:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Answer(seconds, sum(len(output.outputs[0].token_ids) for output in outputs))

    return Served(llm.system_fingerprint, complete, score)


if __name__ == "__main__":
    run(load)
