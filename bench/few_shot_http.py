"""lm-evaluation-harness against a served model: are its scores the same whatever the concurrency?

Runs the task of ``few_shot.py`` with the harness's ``local-completions``, and one of generated answers with
its ``local-chat-completions``, each with 1, 16 and 64 requests at a time. Needs ``lm-eval[api]``.

    loadproof serve smollm2-135m &
    python bench/few_shot_http.py http://127.0.0.1:8000 [--model smollm2-135m] [--concurrency 1,16,64]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from few_shot import TASK, evaluate, report, write_task

CHAT_TASK = f"{TASK}_chat"


def write_chat_task(directory: Path) -> None:
    """The same questions, to be answered in words."""
    task = json.loads((directory / f"{TASK}.yaml").read_text())
    for name in ("doc_to_choice", "metric_list"):
        del task[name]
    task |= {
        "task": CHAT_TASK,
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0.8},
        "metric_list": [{"metric": "exact_match"}],
    }
    (directory / f"{CHAT_TASK}.yaml").write_text(json.dumps(task, indent=2))


def run_completions(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Log-likelihoods, by the server's own tokenizer."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    rows = []
    for count in args.concurrency:
        model = LocalCompletionsAPI(
            base_url=f"{args.url}/v1/completions",
            model=args.model,
            tokenizer_backend="remote",
            num_concurrent=count,
            max_length=2048,
        )
        rows.append({"engine": "completions", "batch": count, **evaluate(model, directory)})
    return rows


def run_chats(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Sampled answers, with the harness's seed."""
    import lm_eval
    from lm_eval.models.openai_completions import LocalChatCompletion
    from lm_eval.tasks import TaskManager

    rows = []
    for count in args.concurrency:
        model = LocalChatCompletion(
            base_url=f"{args.url}/v1/chat/completions", model=args.model, num_concurrent=count
        )
        start = time.perf_counter()
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[CHAT_TASK],
            task_manager=TaskManager(include_path=str(directory), include_defaults=False),
            apply_chat_template=True,
            bootstrap_iters=0,
            verbosity="ERROR",
        )
        seconds = time.perf_counter() - start
        score = found["results"][CHAT_TASK]["exact_match,none"]
        samples = sorted(found["samples"][CHAT_TASK], key=lambda sample: sample["doc_id"])
        answers = [sample["resps"] for sample in samples]
        row = {"engine": "chat", "batch": count, "acc": score, "acc_norm": score, "seconds": seconds}
        rows.append({**row, "answers": answers})
    return rows


def main() -> int:
    """1 where an answer depends on the concurrency."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--fewshot", type=int, default=24)
    parser.set_defaults(concurrency=[1, 16, 64])
    args = parser.parse_args()
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        os.environ["HF_HOME"] = str(directory / "cache")
        write_task(directory, args.questions, args.fewshot)
        write_chat_task(directory)
        failed = report(run_completions(args, directory))
        return report(run_chats(args, directory)) or failed


if __name__ == "__main__":
    sys.exit(main())
