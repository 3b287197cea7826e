"""Drives OpenVINO GenAI's continuous batching on the CPU; the argument is the peers' directory.

Weights, products and cache in bf16, prefix caching on, and the same token budget as the others.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from protocol import Answer, Served, run

BF16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
CACHE_GB = 3


def load(peers: str) -> Served:
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_batched_tokens = 2048
    scheduling.max_num_seqs = 64
    scheduling.cache_size = CACHE_GB
    scheduling.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(str(Path(peers, "smollm2-ov")), scheduling, "CPU", BF16)

    def complete(prompts: list[list[int]], output_len: int) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        start = time.perf_counter()
        results = pipeline.generate(inputs, [config] * len(inputs))
        seconds = time.perf_counter() - start
        return Answer(seconds, sum(len(result.m_generation_ids[0]) for result in results))

    return Served(genai.__version__, complete)


if __name__ == "__main__":
    run(load)
