"""Peak memory of scored prompts: bounded by the settings, not by prompts times vocabulary.

What a scoring run may add to an engine that has run before, whatever the number of requests:

- the pages of the block cache that had not been used: ``kv_cache_memory``, hidden states included;
- a request's results: 8 bytes for each token's log-probability and rank and for each of the k best, twice
  where blocks keep a copy, and Python's lists of its token ids;
- slack for the allocator and for one step's lists.

Logits are in none of these: they are made 128 rows at a time, in memory that the engine takes when it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_model

LENGTH, K = 4096, 20
CACHE = 160 << 20
SLACK = 24 << 20
RESULT = LENGTH * 8 * (K + 1)
LISTS = LENGTH * 3 * (8 + 32)  # token ids, as a caller's list, the engine's and the output's
VOCAB_SIZE = 49152

# ru_maxrss would do but for what a child inherits of its parent's.
SCRIPT = """
import json, sys
import numpy as np
from loadproof import LLM, SamplingParams

def peak():
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

count, length, k, cache = map(int, sys.argv[1:])
llm = LLM("smollm2-135m", max_model_len=length + 1, kv_cache_memory=cache, num_threads=2, max_num_seqs=64)
params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=k)
draw = np.random.default_rng(0)

def prompt(length):
    return draw.integers(100, 40000, length).tolist()

llm.generate([{"prompt_token_ids": prompt(2049)}], params, use_tqdm=False)
before = peak()
prompts = [{"prompt_token_ids": prompt(length)} for _ in range(count)]
outputs = llm.generate(prompts, params, use_tqdm=False)
assert [len(output.prompt_logprobs) for output in outputs] == [length] * count
print(json.dumps({"before": before, "after": peak()}))
"""


def growth(count: int) -> int:
    """Bytes by which ``count`` requests raise the peak of a process that has scored one prompt before."""
    arguments = [str(one) for one in (count, LENGTH, K, CACHE)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout)
    return int(found["after"]) - int(found["before"])


def bound(count: int) -> int:
    return CACHE + SLACK + count * (2 * RESULT + LISTS)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    "count",
    [
        1,
        pytest.param(
            64,
            marks=pytest.mark.skipif(
                os.environ.get("LOADPROOF_EXACTNESS") != "full", reason="minutes: make exactness"
            ),
        ),
    ],
)
def test_a_long_prompt_and_many_stay_within_the_bound(
    smollm2: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = growth(count)
    with capsys.disabled():
        print(f"\n{count} prompts of {LENGTH}: {grown >> 20} MiB more, {bound(count) >> 20} MiB allowed")
    assert grown <= bound(count)
    # Logits of one prompt would take several times the bound for it.
    assert bound(1) < LENGTH * VOCAB_SIZE * 4 // 3
