"""A few-shot evaluation through lm-evaluation-harness: are its scores the same whatever the batch size?

Writes a multiple-choice task of its own (what kind of thing does a word name?), so nothing is fetched, and
runs it on loadproof with each batch size, every time on a fresh engine. ``--peers PYTHON`` names an
interpreter that has vLLM; the same task then runs on the harness's vLLM backend there.

    python bench/few_shot.py MODEL [--batch-sizes 1,16,64] [--peers PYTHON --peer-model DIRECTORY]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

KINDS = {
    "an animal": "horse tiger rabbit wolf eagle salmon camel otter goat whale lizard pigeon",
    "a fruit": "apple banana cherry mango pear plum grape lemon peach orange fig melon",
    "a metal": "iron copper silver gold tin zinc nickel lead mercury titanium aluminium platinum",
    "a vehicle": "car bus train bicycle truck tram boat lorry van motorcycle scooter ferry",
    "a country": "France Brazil Japan Kenya Norway Peru Egypt Canada Greece Chile Vietnam Poland",
    "a tool": "hammer saw drill wrench chisel pliers screwdriver axe shovel rake spanner file",
    "a colour": "red blue green yellow purple brown pink black white grey crimson violet",
    "an instrument": "piano violin flute trumpet guitar cello drum harp clarinet organ oboe banjo",
}
DESCRIPTION = (
    f"Each of the following lines holds a word, and then what kind of thing it names: {', '.join(KINDS)}.\n\n"
)
TASK = "loadproof_few_shot"


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Words with four kinds each, one of them right; no word twice."""
    draw = random.Random(seed)
    words = [(word, kind) for kind, names in KINDS.items() for word in names.split()]
    made = []
    for word, kind in draw.sample(words, count):
        choices = draw.sample([other for other in KINDS if other != kind], 3)
        choices.insert(draw.randrange(4), kind)
        made.append({"word": word, "choices": choices, "answer": choices.index(kind)})
    return made


def write_task(directory: Path, num_questions: int, num_fewshot: int) -> None:
    """The task as the harness wants it: questions, examples and a YAML file (JSON is YAML)."""
    docs = questions(num_questions + num_fewshot, seed=1)
    parts = {"train": docs[:num_fewshot], "test": docs[num_fewshot:]}
    for name, docs in parts.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {name: str(directory / f"{name}.jsonl") for name in parts}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": num_fewshot,
        "description": DESCRIPTION,
        "doc_to_text": "Word: {{word}}\nKind:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": metric} for metric in ("acc", "acc_norm")],
    }
    (directory / f"{TASK}.yaml").write_text(json.dumps(task, indent=2))


def evaluate(model: Any, directory: Path) -> dict[str, Any]:
    """Scores, the log-likelihoods they come from, and seconds, of one run of the harness."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(directory), include_defaults=False)
    start = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model=model, tasks=[TASK], task_manager=manager, bootstrap_iters=0, verbosity="ERROR"
    )
    seconds = time.perf_counter() - start
    results, samples = found["results"][TASK], found["samples"][TASK]
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    return {
        "acc": results["acc,none"],
        "acc_norm": results["acc_norm,none"],
        "seconds": seconds,
        "answers": [sample["filtered_resps"] for sample in ordered],
    }


def run_loadproof(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    from loadproof.lm_eval import LoadproofLM

    rows = []
    for batch_size in args.batch_sizes:
        model = LoadproofLM(args.model, batch_size=batch_size)
        rows.append({"engine": "loadproof", "batch": batch_size, **evaluate(model, directory)})
        model.llm.close()
    return rows


def run_vllm(model: str, batch_sizes: list[int], directory: Path, result: Path) -> None:
    """In the peer's interpreter: one engine for all batch sizes, since it takes minutes to start.

    ``result`` is written while the engine lives, since some of its releases abort the process as they end.
    """
    engine = _vllm_backend()(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        batch_size=batch_sizes[0],
        gpu_memory_utilization=0.3,  # of the machine's memory, whatever its name says
    )
    rows = []
    for batch_size in batch_sizes:
        engine.batch_size = batch_size
        rows.append({"engine": "vllm", "batch": batch_size, **evaluate(engine, directory)})
    result.write_text(json.dumps(rows))


def _vllm_backend() -> Any:
    """The harness's model; it asks for a package ``vllm``, which vLLM's builds for the CPU aren't named."""
    vllm = importlib.import_module("vllm")
    platform = importlib.import_module("vllm.platforms").current_platform
    assert platform.device_type, "vLLM, which asks for its name too, finds no device"
    ask = importlib.metadata.version

    def version(name: str) -> str:
        found: str = vllm.__version__ if name == "vllm" else ask(name)
        return found

    with mock.patch("importlib.metadata.version", version):
        return importlib.import_module("lm_eval.models.vllm_causallms").VLLM


def run_peer(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """The peer's interpreter runs this script, with our harness at the end of its path."""
    import lm_eval

    result = directory / "peer.json"
    command = [args.peers, __file__, args.peer_model or args.model, "--as-peer", str(result)]
    command += ["--batch-sizes", ",".join(map(str, args.batch_sizes)), "--directory", str(directory)]
    command += ["--harness", str(Path(lm_eval.__file__).parent.parent)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    status = subprocess.run(command, check=False, env=environment, stdout=sys.stderr).returncode
    if not result.exists():
        raise RuntimeError(f"the peer ended with {status} and no result")
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def report(rows: list[dict[str, Any]]) -> int:
    """Prints an engine's table; 1 where its log-likelihoods, in any bit, depend on the batch size."""
    print(f"{'engine':<10} {'batch':>5} {'acc':>8} {'acc_norm':>8} {'seconds':>8}  questions that differ")
    failed = 0
    for row in rows:
        pairs = zip(row["answers"], rows[0]["answers"], strict=True)
        count = sum(found != first for found, first in pairs)
        failed |= count > 0
        scores = f"{row['acc']:>8.4f} {row['acc_norm']:>8.4f} {row['seconds']:>8.1f}"
        print(f"{row['engine']:<10} {row['batch']:>5} {scores}  {count} of {len(row['answers'])}", flush=True)
    return failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--batch-sizes", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--fewshot", type=int, default=24)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter with vLLM")
    parser.add_argument("--peer-model", help="the model for the peer, where that is another file")
    parser.add_argument("--as-peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--harness", help=argparse.SUPPRESS)
    parser.set_defaults(batch_sizes=[1, 16, 64])
    return parser.parse_args()


def main() -> int:
    args = parse()
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
    if args.as_peer is not None:
        sys.path.append(args.harness)  # at the end: what the peer has itself stays its own
        run_vllm(args.model, args.batch_sizes, args.directory, args.as_peer)
        return 0
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        os.environ["HF_HOME"] = str(directory / "cache")
        write_task(directory, args.questions, args.fewshot)
        failed = report(run_loadproof(args, directory))
        if args.peers:
            report(run_peer(args, directory))
        return failed


if __name__ == "__main__":
    sys.exit(main())
