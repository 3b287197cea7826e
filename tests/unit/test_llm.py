from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fake_device import FakeDevice, fake_loader

import loadproof
from loadproof import LLM, SamplingParams
from loadproof.config import ConfigError
from loadproof.engine.admission import RequestError
from loadproof.engine.prompts import PromptError

GREEDY = SamplingParams(temperature=0, max_tokens=8, seed=0)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr("loadproof.llm.load_model", fake_loader())
    with LLM("fake") as loaded:
        yield loaded


def test_prompts_of_every_form_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    forms: list[Any] = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}, tuple(ids)]
    outputs = llm.generate(forms, GREEDY)
    assert [output.prompt for output in outputs] == ["hello", None, "hello", None, None]
    for output in outputs:
        assert output.prompt_token_ids == ids
        assert output.outputs == outputs[0].outputs
        assert output.finished
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3], {"prompt": "x"}, {"prompt_token_ids": [5]}])
def test_one_prompt_needs_no_list(llm: LLM, prompt: Any) -> None:
    (one,) = llm.generate(prompt, GREEDY)
    (listed,) = llm.generate([prompt], GREEDY)
    assert one.outputs == listed.outputs


def test_outputs_come_in_the_prompts_order(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=40 - index, ignore_eos=True) for index in range(30)]
    outputs = llm.generate([[index] for index in range(30)], params)
    assert [output.prompt_token_ids for output in outputs] == [[index] for index in range(30)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40 - index for index in range(30)]


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    "prompts",
    [
        3,
        None,
        [None],
        [{}],
        [{"prompt": 3}],
        [{"prompt_token_ids": "x"}],
        [{"prompt": "a", "prompt_token_ids": [1]}],
    ],
)
def test_prompts_of_another_form_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(PromptError):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("bad", [[], [1] * 500, [10**6], [1.5], ["a", 1]])
def test_one_bad_prompt_computes_nothing(llm: LLM, bad: list[Any]) -> None:
    with pytest.raises(RequestError):
        llm.generate([[1], bad], GREEDY)
    stats = llm.stats()
    assert (stats["num_steps"], stats["num_waiting"], stats["num_running"]) == (0, 0, 0)
    assert len(llm.generate([[1]], GREEDY)) == 1


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts and 3 sampling parameters"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_chat_is_the_template_completed(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.tokenizer.encode_chat(messages)
    assert output.outputs == llm.generate(output.prompt_token_ids, GREEDY)[0].outputs


def test_several_chats_and_template_options(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("a", "b")]
    outputs = llm.chat(chats, GREEDY, chat_template_kwargs={"add_generation_prompt": False})
    again = llm.chat(chats, GREEDY, add_generation_prompt=False)
    assert [output.outputs for output in again] == [output.outputs for output in outputs]
    assert [output.prompt for output in outputs] == [
        "<|im_start|>user\na<|im_end|>\n",
        "<|im_start|>user\nb<|im_end|>\n",
    ]


def test_the_models_own_parameters_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, object] = {
        "temperature": 0.25,
        "top_k": 7,
        "max_new_tokens": 3,
        "do_sample": True,
        "top_p": None,
    }
    monkeypatch.setattr("loadproof.llm.load_model", fake_loader(config))
    with LLM("fake") as llm:
        default = llm.get_default_sampling_params()
        assert default == SamplingParams(temperature=0.25, top_k=7, max_tokens=3)
        (output,) = llm.generate([1])
        assert len(output.outputs[0].token_ids) <= 3


def test_a_stream_is_the_output_in_pieces(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=2, max_tokens=20)
    deltas = list(llm.stream("hello", params))
    (output,) = llm.generate("hello", params)
    for completion in output.outputs:
        pieces = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in pieces) == completion.text
        assert pieces[-1].finish_reason == completion.finish_reason


def test_closing_a_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.stats()["num_running"] == 1
    stream.close()
    stats = llm.stats()
    assert (stats["num_running"], stats["num_aborted"]) == (0, 1)
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_a_stream_waits_while_others_are_served(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    whole = llm.generate("hello", params)[0].outputs[0].text
    stream = llm.stream("hello", params)
    text = next(stream).text
    assert llm.generate(["other", "prompts"], GREEDY)
    assert text + "".join(delta.text for delta in stream) == whole


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM) -> None:
    device = llm.engine.device
    assert isinstance(device, FakeDevice)
    device.fail_at_step = 3
    with pytest.raises(RuntimeError, match="the device failed"):
        llm.generate([[1]] * 20, SamplingParams(max_tokens=50))
    stats = llm.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert len(llm.generate([[1]] * 20, GREEDY)) == 20


def test_logits_can_be_watched(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.on_logits(lambda name, index, position, logits: seen.append((position, int(logits.argmax()))))
    (output,) = llm.generate([1, 2], GREEDY)
    assert seen == [(2 + place, token) for place, token in enumerate(output.outputs[0].token_ids)]
    llm.on_logits(None)
    llm.generate([1, 2], GREEDY)
    assert len(seen) == len(output.outputs[0].token_ids)


def test_settings_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="no such settings: dtype"):
        LLM("no such model", dtype="float16")
    with pytest.raises(ConfigError, match="block_size"):
        LLM("no such model", block_size=5)


def test_what_is_exported_can_be_had() -> None:
    assert {name for name in loadproof.__all__ if getattr(loadproof, name) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loadproof.nothing


def test_importing_the_package_imports_nothing_else() -> None:
    """Start-up time counts from the import, so what is heavy comes when it is first used."""
    heavy = ("numpy", "rich", "jinja2", "huggingface_hub", "tokenizers", "gguf", "click")
    script = f"import sys, loadproof; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
