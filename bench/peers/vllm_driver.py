"""Drives vLLM for the CPU through its Python interface; the argument is the peers' directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from protocol import Answer, Served, run

MEMORY_SHARE = 0.3  # of the machine's, whatever its name says; the default leaves no room for other engines

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def load(peers: str) -> Served:
    import vllm  # after the setting above, which it reads when imported

    llm = vllm.LLM(
        str(Path(peers, "smollm2")),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        gpu_memory_utilization=MEMORY_SHARE,
    )

    def complete(prompts: list[list[int]], output_len: int) -> Answer:
        return generate(prompts, max_tokens=output_len, ignore_eos=True)

    def score(prompts: list[list[int]], prompt_logprobs: int) -> Answer:
        return generate(prompts, max_tokens=1, prompt_logprobs=prompt_logprobs)

    def generate(prompts: list[list[int]], **settings: Any) -> Answer:
        params = vllm.SamplingParams(temperature=0, **settings)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Answer(seconds, sum(len(output.outputs[0].token_ids) for output in outputs))

    return Served(vllm.__version__, complete, score)


if __name__ == "__main__":
    run(load)
