"""The harness's model, with a stand-in for the harness where that isn't installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.tiny_models import write_model

from loadproof import LLM, SamplingParams

LENGTH = 160
PAIRS = [("the rain in", " spain"), ("the rain in", " a tin"), ("", "tea"), ("a note ", "on"), ("x", " y")]
TEXTS = ["the rain in spain " * 30, "", "tea"]


@dataclass
class Request:
    """The harness's instance."""

    args: tuple[Any, ...]


@dataclass
class Hook:
    """The harness's hook for its cache of answers."""

    kept: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)

    def add_partial(self, kind: str, args: tuple[Any, ...], answer: Any) -> None:
        self.kept.append((kind, args, answer))


class StandInLM:
    """What the harness's base class gives its models."""

    def __init__(self) -> None:
        self.cache_hook = Hook()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stand-in's models by name, once the adapter has been imported."""
    found: dict[str, Any] = {}
    names = ("lm_eval", "lm_eval.models", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["lm_eval.api.model"])["LM"] = StandInLM
    vars(modules["lm_eval.api.registry"])["register_model"] = lambda name: (
        lambda cls: found.setdefault(name, cls)
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "loadproof.lm_eval", raising=False)
    importlib.import_module("loadproof.lm_eval")
    del sys.modules["loadproof.lm_eval"]  # nobody else shall find the one made for the stand-in
    return found


@pytest.fixture
def made(registered: dict[str, Any], directory: Path) -> Iterator[Any]:
    """Makes models with the options given, and closes them."""
    models: list[Any] = []

    def make(**options: Any) -> Any:
        settings = {"max_length": LENGTH, "num_threads": 1, **options}
        models.append(registered["loadproof"](str(directory), **settings))
        return models[-1]

    yield make
    for model in models:
        model.llm.close()


@pytest.fixture
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, num_threads=1, max_model_len=LENGTH) as loaded:
        yield loaded


def _requests(*args: tuple[Any, ...]) -> list[Request]:
    return [Request(each) for each in args]


@pytest.mark.parametrize("batch_size", [1, 2, "auto", "auto:4", "3"])
def test_every_batch_size_gives_the_same(made: Any, llm: LLM, batch_size: int | str) -> None:
    model = made(batch_size=batch_size)
    expected = [llm.score(context, [part])[0] for context, part in PAIRS]
    answers = [(score.logprob, score.is_greedy) for score in expected]
    assert model.loglikelihood(_requests(*PAIRS)) == answers
    first, last = (score.logprob for score in llm.score_texts([TEXTS[0], TEXTS[2]]))
    rolling = model.loglikelihood_rolling(_requests(*((text,) for text in TEXTS)), disable_tqdm=True)
    assert rolling == [first, 0.0, last]
    wanted: dict[str, Any] = {"until": ["zz"], "max_gen_toks": 9}
    texts = model.generate_until(_requests(*((context, wanted) for context, _ in PAIRS)))
    params = SamplingParams(temperature=0, max_tokens=9, stop="zz", skip_special_tokens=False)
    prompts = [llm.tokenizer.encode(context) or [0] for context, _ in PAIRS]
    assert texts == [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert any(texts)


def test_batches_are_handed_over_one_by_one(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    generate = LLM.generate

    def counting(self: LLM, prompts: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(prompts))
        return generate(self, prompts, *args, **options)

    monkeypatch.setattr(LLM, "generate", counting)
    made(batch_size=2).loglikelihood(_requests(*PAIRS))
    made(max_batch_size=3).loglikelihood(_requests(*PAIRS))
    made().loglikelihood(_requests(*PAIRS))
    assert sizes == [2, 2, 1, 3, 2, 5]
    assert made().loglikelihood([]) == []


def test_answers_are_kept_in_the_harnesss_cache(made: Any) -> None:
    model = made(batch_size=2)
    answers = model.loglikelihood(_requests(*PAIRS))
    texts = model.generate_until(_requests(("a", {"max_gen_toks": 2})))
    assert model.cache_hook.kept == [
        *(("loglikelihood", pair, answer) for pair, answer in zip(PAIRS, answers, strict=True)),
        ("generate_until", ("a", {"max_gen_toks": 2}), texts[0]),
    ]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the adapter logged; others' threads may log at any time."""
    return [record.getMessage() for record in caplog.records if record.name == "loadproof.lm_eval"]


def test_what_is_too_long_is_cut_from_the_left_and_said_so(
    made: Any, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(batch_size=1)
    long = "".join(f"{number} bells, " for number in range(90))
    with caplog.at_level(logging.WARNING):
        (found,) = model.loglikelihood(_requests((long, " tea")))
        (text,) = model.generate_until(_requests((long, {"max_gen_toks": 20})))
    assert said(caplog) == ["1 of 1 contexts were too long and cut from the left"] * 2
    (score,) = llm.score(long, [" tea"], truncate_context=True)
    assert found == (score.logprob, score.is_greedy)
    params = SamplingParams(temperature=0, max_tokens=20, skip_special_tokens=False)
    kept = llm.tokenizer.encode(long)[-(LENGTH - 20) :]
    assert text == llm.generate(kept, params)[0].outputs[0].text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"temperature": 0.0, "max_tokens": LENGTH - 1}),
        ({"max_new_tokens": 5, "max_tokens": 7}, {"temperature": 0.0, "max_tokens": 5}),
        ({"do_sample": False, "temperature": 0.7, "max_tokens": 7}, {"temperature": 0.0, "max_tokens": 7}),
        ({"do_sample": True, "max_gen_toks": 3}, {"temperature": 1.0, "max_tokens": 3}),
        ({"temperature": 0.5, "top_p": 0.9, "seed": 3}, {"temperature": 0.5, "top_p": 0.9, "seed": 3}),
        ({"until": "\n", "temperature": None}, {"stop": ("\n",), "temperature": 0.0}),
        ({"until": ["\n\n", "", "</s>"]}, {"stop": ("\n\n", "</s>")}),
    ],
)
def test_generation_options(
    made: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    given: list[SamplingParams] = []

    def generate(self: LLM, prompts: Any, params: list[SamplingParams], **_: Any) -> list[Any]:
        given.extend(params)
        return [SimpleNamespace(outputs=[SimpleNamespace(text="so")])]

    monkeypatch.setattr(LLM, "generate", generate)
    model = made()
    assert model.generate_until(_requests(("a", options))) == ["so"]
    (params,) = given
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.skip_special_tokens is False


def test_sampled_answers_are_the_same_for_every_batch_size(made: Any) -> None:
    options = {"do_sample": True, "max_gen_toks": 8}
    requests = _requests(*((context, options) for context, _ in PAIRS))
    assert made(batch_size=1).generate_until(requests) == made(batch_size=4).generate_until(requests)
    assert made(seed=1).generate_until(requests) != made(seed=2).generate_until(requests)


def test_chats_use_the_models_template(made: Any) -> None:
    model = made()
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    assert model.apply_chat_template(chat) == "<s>user: hi\nassistant: so\nassistant:"
    assert model.apply_chat_template(chat, add_generation_prompt=False) == "<s>user: hi\nassistant: so"
    assert "/" not in model.tokenizer_name
    assert (model.chat_template(True), model.chat_template(False)) == ("", None)
    with pytest.raises(ValueError, match=r"'other'.*only the model's default one"):
        model.chat_template("other")


def test_the_run_records_what_answered(made: Any) -> None:
    model = made()
    info = model.get_model_info()
    assert info == {
        "model_name": model.llm.model_name,
        "system_fingerprint": model.llm.system_fingerprint,
    }
    assert model.max_length == LENGTH


def test_the_device_that_the_harness_names_unasked_is_ignored(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        expected = made(device="cpu").loglikelihood(_requests(*PAIRS))
        assert said(caplog) == []
        assert made(device="cuda:0").loglikelihood(_requests(*PAIRS)) == expected
    assert said(caplog) == ["device 'cuda:0' is ignored: the engine computes on the CPU"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is a number from 1 on, not 0"),
        ({"batch_size": "many"}, "batch_size is a number from 1 on, not 'many'"),
        ({"max_batch_size": 0}, "max_batch_size is a number"),
        ({"max_gen_toks": -1}, "max_gen_toks is a number"),
        ({"tensor_parallel_size": 2}, "no such settings: tensor_parallel_size"),
    ],
)
def test_options_that_can_not_be(made: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_generation_options_that_are_not_known_are_refused(made: Any) -> None:
    with pytest.raises(ValueError, match="not supported: num_beams"):
        made().generate_until(_requests(("a", {"num_beams": 2})))


def test_without_the_harness_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "loadproof.lm_eval", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'loadproof\[lm-eval\]'"):
        importlib.import_module("loadproof.lm_eval")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is missing")
@pytest.mark.filterwarnings("default")
def test_the_harness_itself_runs_a_task_on_it(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    docs = [{"word": word, "choices": ["one", "ten", "tin"], "answer": 1} for word in ("tea", "neat")]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{word}}:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    (tmp_path / "words.yaml").write_text(json.dumps(task))
    harness: Any = importlib.import_module("lm_eval")
    tasks: Any = importlib.import_module("lm_eval.tasks")
    importlib.import_module("loadproof.lm_eval")
    found = harness.simple_evaluate(
        model="loadproof",
        model_args={"pretrained": str(directory), "max_length": LENGTH, "num_threads": 1},
        batch_size=2,
        tasks=["words"],
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["config"]["system_fingerprint"].startswith("lp_")
    with LLM(directory, num_threads=1, max_model_len=LENGTH) as llm:
        for sample in found["samples"]["words"]:
            scores = llm.score(f"{sample['doc']['word']}:", [" one", " ten", " tin"])
            expected = [(score.logprob, score.is_greedy) for score in scores]
            assert [tuple(answer) for answer in sample["filtered_resps"]] == expected
