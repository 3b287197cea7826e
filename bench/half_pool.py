"""batch64 with half the blocks that it needs, against all of them: what preemption costs.

    python bench/half_pool.py [MODEL] [--rounds 5]

64 prompts of 256 tokens, 128 tokens each, on two engines in turn; a round that isn't counted comes first.
"""

from __future__ import annotations

import argparse
import statistics

from loadproof import LLM
from loadproof.bench import Workload, measure

WORKLOAD = Workload("batch64", 64, 256, 128)
BLOCK_SIZE = 32
NEEDED = WORKLOAD.num_prompts * (WORKLOAD.input_len + WORKLOAD.output_len) // BLOCK_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings = {"max_model_len": 2048, "block_size": BLOCK_SIZE}
    whole = LLM(options.model, num_blocks_override=NEEDED, **settings)
    half = LLM(options.model, num_blocks_override=NEEDED // 2, **settings)
    with whole, half:
        ratios = []
        for index in range(options.rounds + 1):
            seconds = {}
            for llm in (whole, half) if index % 2 else (half, whole):
                seconds[llm] = measure(llm.engine, WORKLOAD, 1 + index).elapsed
            ratio = seconds[whole] / seconds[half]
            preempted = half.stats()["num_preemptions"]
            print(
                f"round {index}: {seconds[whole]:.2f} s with {NEEDED} blocks, {seconds[half]:.2f} s with "
                f"{NEEDED // 2}: {ratio:.2f} of the speed; {preempted} preemptions so far",
                flush=True,
            )
            if index:
                ratios.append(ratio)
        print(f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
