from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
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


def test_arrays_and_numpys_integers_are_token_ids(llm: LLM) -> None:
    (expected,) = llm.generate([5, 6, 7], GREEDY)
    forms: list[Any] = [
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.uint8),
        [np.int64(5), np.int32(6), 7],
        [np.array([5, 6, 7])],
        {"prompt_token_ids": np.array([5, 6, 7])},
        np.array([[5, 6, 7]]),
    ]
    for form in forms:
        (output,) = llm.generate(form, GREEDY)
        assert output.outputs == expected.outputs
        assert output.prompt_token_ids == [5, 6, 7]
        assert {type(token_id) for token_id in output.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"abc", "not bytes"),
        ([bytearray(b"abc")], "not bytearray"),
        ([memoryview(b"abc")], "not memoryview"),
        ({"prompt": None}, "prompt is text, not NoneType"),
        ({1: "a", "prompt": 2}, r"not \[1, 'prompt'\]"),
        (np.array([1.5]), r"not float64 of shape \(1,\)"),
        (np.array([True]), "not bool"),
        ([np.ones((2, 2, 2), int)], r"shape \(2, 2, 2\)"),
        ([["a", "b"], [1]], "prompt 1 of 2: a prompt's token ids are integers, not 'a'"),
        ([[1], {}], "prompt 2 of 2: a prompt object"),
        (["a", "\ud800", "b"], "prompt 2 of 3: the text has a lone surrogate"),
        ([[1], [2], [10**6]], "prompt 3 of 3: token id 1000000 is outside"),
        ([10**6], "^token id 1000000 is outside"),
    ],
)
def test_a_refused_prompt_is_named(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0}, "a SamplingParams or a list of them, not dict"),
        ("x", "or a list of them, not str"),
        (3, "or a list of them, not int"),
        ([None], r"sampling_params\[0\] is a SamplingParams, not NoneType"),
        (["x"], r"sampling_params\[0\] is a SamplingParams, not str"),
    ],
)
def test_sampling_parameters_of_another_type_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["a"], params)
    with pytest.raises(ValueError, match=message):
        next(llm.stream("a", params))


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("hi", {}, "messages is a list of messages, or a list of such lists, not str"),
        ({"role": "user", "content": "hi"}, {}, "not dict"),
        (None, {}, "not NoneType"),
        (["hi"], {}, "messages is a list of messages, not str"),
        ([HI, []], {}, "prompt 2 of 2: messages is empty"),
        (HI, {"tools": "x"}, "tools is a list of objects, not str"),
        (HI, {"tools": [3]}, r"tools\[0\] is an object, not int"),
        (HI, {"chat_template_kwargs": {"tools": {}}}, "tools is a list of objects, not dict"),
        (HI, {"chat_template_kwargs": {"messages": []}}, "another argument does: messages"),
        (HI, {"chat_template_kwargs": {"tools": []}, "tools": []}, "another argument does: tools"),
        (
            HI,
            {"chat_template": "{{ messages }}"},
            "no such options of a chat: chat_template; there are add_gen",
        ),
        (HI, {"add_generation_promt": False}, "no such options of a chat: add_generation_promt"),
        (HI, {"priority": "nonsense"}, "priority is a list of 1 integers"),
        (HI, {"chat_template_kwargs": [1]}, "chat_template_kwargs is an object"),
        (HI, {"chat_template_kwargs": {1: 1}}, "chat_template_kwargs is an object"),
    ],
)
def test_chats_of_another_form_are_refused(
    llm: LLM, messages: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY, **options)


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


def test_a_hook_may_remove_itself(llm: LLM) -> None:
    def once(*_: object) -> None:
        llm.on_logits(None)

    llm.on_logits(once)
    assert len(llm.generate(["one", "two"], GREEDY)) == 2


def test_a_stream_is_of_one_prompt(llm: LLM) -> None:
    for prompt in (5, np.int64(5), None):
        with pytest.raises(ValueError, match="a prompt is text or a list of token ids, not "):
            next(llm.stream(prompt, GREEDY))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token ids are integers, not 'text'"):
        next(llm.stream(["text"], GREEDY))  # type: ignore[list-item]


def test_a_model_of_another_type_is_refused() -> None:
    for model in (None, 5, b"/tmp"):
        with pytest.raises(ConfigError, match="model"):
            LLM(model)  # type: ignore[arg-type]


def test_chats_have_priorities(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("a", "b")]
    plain = llm.chat(chats, GREEDY)
    assert [out.outputs for out in llm.chat(chats, GREEDY, priority=[0, 0])] == [out.outputs for out in plain]
    with pytest.raises(ValueError, match=r"prompt 2 of 2.*priority"):
        llm.chat(chats, GREEDY, priority=[0, 1])


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
