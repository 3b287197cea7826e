"""The oracle against transformers' answers, and its own promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from tests.tiny_models import TINY, TinyModel, TinySource, write_model
from tokenizers import Tokenizer

from loadproof.devices.reference import ReferenceDevice
from loadproof.graph import Param
from loadproof.models import build_graph
from loadproof.weights.tensors import BF16, Array, WeightsError

EVERY = pytest.mark.parametrize("model", TINY.values(), ids=TINY.keys())


class Broken:
    """A source with some tensors of other shapes, or gone, that must not be read."""

    def __init__(self, source: TinySource, changes: dict[str, tuple[int, ...] | None]) -> None:
        shapes: dict[str, tuple[int, ...] | None] = {**source.shapes(), **changes}
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Array:
        raise AssertionError(f"{name} was read from a checkpoint that does not fit")

    def read_bf16(self, name: str) -> BF16:
        raise AssertionError(f"{name} was read from a checkpoint that does not fit")

    def digest(self) -> str:
        return "broken"


def device(model: TinyModel) -> ReferenceDevice:
    return ReferenceDevice(model.graph, model.source)


@EVERY
def test_logits_are_within_1e_4_of_transformers(model: TinyModel) -> None:
    ours = device(model)
    for case in model.golden:
        assert case.logits.shape == (len(case.prompt), model.graph.vocab_size)
        assert case.logits.std() > 1
        np.testing.assert_allclose(ours.forward(case.prompt), case.logits, atol=1e-4, rtol=0)


@EVERY
def test_greedy_continuations_are_those_of_transformers(model: TinyModel) -> None:
    ours = device(model)
    for case in model.golden:
        assert ours.greedy(case.prompt, len(case.greedy)) == case.greedy


@EVERY
def test_every_tensor_moves_the_logits(model: TinyModel) -> None:
    ours, prompt = device(model), model.golden[-1].prompt
    before = ours.forward(prompt)
    for name, weight in ours._weights.items():
        ours._weights[name] = weight[::-1]
        assert not np.allclose(ours.forward(prompt), before, atol=1e-3), name
        ours._weights[name] = weight


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_theta": 11000.0}),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama3-rope", {"rope_scaling": None}),
        ("llama-bias", {"hidden_act": "gelu_new"}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"max_window_layers": 3}),
        ("qwen2", {"use_sliding_window": False}),
        ("gemma3", {"sliding_window": 7}),
        ("gemma3", {"sliding_window_pattern": 4}),
        ("gemma3", {"rope_local_base_freq": 20000.0}),
        ("gemma3", {"rope_scaling": None}),
        ("gemma3", {"query_pre_attn_scalar": 25}),
        ("gemma3-softcap", {"attn_logit_softcapping": None}),
        ("gemma3-softcap", {"final_logit_softcapping": None}),
    ],
)
def test_the_goldens_tell_a_setting_from_its_neighbour(name: str, change: dict[str, Any]) -> None:
    model, case = TINY[name], TINY[name].golden[-1]
    wrong = ReferenceDevice(build_graph({**model.config, **change}), model.source)
    assert np.abs(wrong.forward(case.prompt) - case.logits).max() > 1e-3


@EVERY
def test_later_tokens_never_change_earlier_logits(model: TinyModel) -> None:
    ours, prompt = device(model), model.golden[-1].prompt
    changed = [*prompt[:20], *reversed(prompt[20:])]
    np.testing.assert_allclose(ours.forward(changed)[:20], ours.forward(prompt)[:20], atol=1e-4, rtol=0)
    np.testing.assert_allclose(ours.forward(prompt[:20]), ours.forward(prompt)[:20], atol=1e-4, rtol=0)


def test_a_window_hides_what_lies_before_it() -> None:
    """In two of Mistral's layers of 8 keys a token reaches 14 positions back, and no further."""
    model = TINY["mistral"]
    graph = build_graph({**model.config, "num_hidden_layers": 2})
    ours, prompt = ReferenceDevice(graph, model.source), model.golden[-1].prompt
    before = ours.forward(prompt)[-1]
    reach = len(prompt) - 15
    beyond, within = list(prompt), list(prompt)
    beyond[reach - 1] ^= 1
    within[reach] ^= 1
    np.testing.assert_allclose(ours.forward(beyond)[-1], before, atol=1e-6)
    assert np.abs(ours.forward(within)[-1] - before).max() > 1e-5


def test_rows_choose_the_logits() -> None:
    ours, prompt = device(TINY["llama"]), TINY["llama"].golden[-1].prompt
    every = ours.forward(np.asarray(prompt, np.int32))
    np.testing.assert_allclose(ours.forward(prompt, slice(-3, None)), every[-3:], atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "not 1 to 512"),
        ([5] * 513, "not 1 to 512"),
        ([288], "within 0 to 287"),
        ([-1], "within 0 to 287"),
    ],
)
def test_tokens_are_checked(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        device(TINY["llama"]).forward(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.norm.weight": (63,)}, r"model.norm.weight has shape \(63,\), not \(64,\)"),
        ({"model.layers.2.mlp.up_proj.weight": (64, 160)}, r"up_proj.weight has shape \(64, 160\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_unread(
    changes: dict[str, tuple[int, ...] | None], message: str
) -> None:
    model = TINY["llama"]
    with pytest.raises(WeightsError, match=message):
        ReferenceDevice(model.graph, Broken(model.source, changes))


def test_a_tied_table_is_held_once() -> None:
    model = TINY["llama"]
    elements = sum(weight.size for weight in device(model)._weights.values())
    assert elements == sum(int(np.prod(shape)) for shape in model.source.shapes().values())
    assert Param("model.embed_tokens.weight", (288, 64)) in model.graph.params.values()


@EVERY
def test_a_model_is_written_as_users_have_it(model: TinyModel, tmp_path: Path) -> None:
    directory = write_model(tmp_path / model.name, model.name)
    assert build_graph(json.loads((directory / "config.json").read_text())) == model.graph
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        assert {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()} == model.source.shapes()  # noqa: SIM118
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= model.graph.vocab_size
    ids = tokenizer.encode("tea at the inn, \N{GRINNING FACE}").ids
    assert max(ids) < model.graph.vocab_size
    assert tokenizer.decode(ids) == "tea at the inn, \N{GRINNING FACE}"


def test_the_weights_are_those_the_goldens_were_made_with() -> None:
    source = TINY["llama"].source
    table = source.read("model.embed_tokens.weight")
    assert table.dtype == ml_dtypes.bfloat16
    assert source.digest() == "e46492b690abf337f7f85fbf95e0a2d7101bad83372804e304eac7f99e8d6e9d"
