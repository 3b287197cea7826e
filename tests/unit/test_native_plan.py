"""The native plan against the float32 oracle and transformers' goldens, at every level."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from tests.exactness.drive import alone, make_device
from tests.rounding import rounding
from tests.tiny_models import TINY, TinyModel

from loadproof import _native
from loadproof.devices.cpu import CpuDevice
from loadproof.devices.reference import F32, ReferenceDevice

# The plan may differ from the oracle by as much as bf16 rounding moves the oracle itself: what enters a
# product (a linear layer's input, queries, keys and values) rounded to bf16 and all else in float32. Both
# errors are random sums of the same parts, and so alike in the mean square; the plan also rounds
# probabilities, which adds little to it.
MEAN_SQUARE_ROOM = 1.15
LARGEST_ROOM = 2.0  # the largest of some thousand errors, a less steady figure


@pytest.fixture(params=[f"{name}-{isa}" for isa in _native.available_levels() for name in TINY])
def subject(request: pytest.FixtureRequest) -> Iterator[tuple[TinyModel, CpuDevice]]:
    name, _, isa = request.param.rpartition("-")
    model = TINY[name]
    device = make_device(model.graph, model.source, isa, num_threads=2)
    yield model, device
    device.close()


def prompts_of(model: TinyModel) -> list[list[int]]:
    random = np.random.default_rng(0).integers(0, model.graph.vocab_size, 200)
    return [*(case.prompt for case in model.golden), random.tolist()]


@cache
def oracle(name: str) -> list[F32]:
    device = ReferenceDevice(TINY[name].graph, TINY[name].source)
    return [device.forward(prompt) for prompt in prompts_of(TINY[name])]


@cache
def rounded_oracle(name: str) -> list[F32]:
    """The oracle's logits where what enters a product is rounded."""
    with rounding():
        device = ReferenceDevice(TINY[name].graph, TINY[name].source)
        return [device.forward(prompt) for prompt in prompts_of(TINY[name])]


def mean_square_root(errors: list[F32]) -> float:
    return float(np.sqrt(np.square(np.concatenate(errors)).mean()))


def largest(errors: list[F32]) -> float:
    return float(np.abs(np.concatenate(errors)).max())


def test_logits_differ_from_the_oracles_as_bf16_rounding_does(subject: tuple[TinyModel, CpuDevice]) -> None:
    model, device = subject
    exact = oracle(model.name)
    ours = [alone(device, p) - e for p, e in zip(prompts_of(model), exact, strict=True)]
    rounding = [r - e for r, e in zip(rounded_oracle(model.name), exact, strict=True)]
    assert mean_square_root(ours) < MEAN_SQUARE_ROOM * mean_square_root(rounding)
    assert largest(ours) < LARGEST_ROOM * largest(rounding)


@pytest.mark.parametrize("name", TINY)
def test_rounding_is_a_small_part_of_the_logits(name: str) -> None:
    """Else the bounds above would let a wrong plan through."""
    exact = oracle(name)
    rounding = [r - e for r, e in zip(rounded_oracle(name), exact, strict=True)]
    assert 0 < mean_square_root(rounding) < 0.02 * mean_square_root(exact)


def test_greedy_continuations_are_those_of_transformers(subject: tuple[TinyModel, CpuDevice]) -> None:
    model, device = subject
    for case in model.golden:
        tokens = list(case.prompt)
        for _ in case.greedy:
            tokens.append(int(alone(device, tokens)[-1].argmax()))
        assert tokens[len(case.prompt) :] == case.greedy
