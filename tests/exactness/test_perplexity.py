"""The native plan predicts text as well as the float32 oracle does, on the real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.exactness.drive import Rows, batch_of
from tests.golden.text.make_perplexity import DIRECTORY, surprise, text, tokenizer_of

from loadproof import _native
from loadproof.devices.cpu import CpuDevice
from loadproof.devices.device import I32, DeviceLimits
from loadproof.devices.reference import ReferenceDevice
from loadproof.models import build_graph
from loadproof.weights.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.real_model

LEVELS = _native.available_levels()
ROWS = 128  # of a step, each with its logits
BLOCK_SIZE = 32
# All of the text at the best level, and as much as the others' speed allows.
NUM_TOKENS = {LEVELS[0]: 4096, "portable": 129}
OTHER = 641


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Checkpoint:
    return open_checkpoint(smollm2)


@pytest.fixture(scope="module")
def golden() -> tuple[I32, npt.NDArray[np.float32]]:
    """Tokens ``[T]`` of the text, and the oracle's surprise ``[T - 1]`` at all but the first."""
    with np.load(DIRECTORY / "nll.npz", allow_pickle=False) as stored:
        return stored["tokens"], stored["nll"]


@pytest.fixture(params=LEVELS)
def device(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[CpuDevice]:
    limits = DeviceLimits(ROWS, ROWS, 4096, BLOCK_SIZE, 4096 // BLOCK_SIZE)
    made = CpuDevice(build_graph(checkpoint.config), checkpoint.tensors, limits, isa=request.param)
    yield made
    made.close()


def surprise_of(device: CpuDevice, tokens: I32) -> npt.NDArray[np.float64]:
    """The device's surprise at each token but the first."""
    known, blocks = tokens[:-1].tolist(), range(device.limits.num_blocks)
    found = []
    for start in range(0, len(known), ROWS):
        stop = min(start + ROWS, len(known))
        logits = device.execute(batch_of([Rows(known, start, stop, blocks)])).logits
        assert logits is not None
        found.append(surprise(logits, tokens[start + 1 : stop + 1]))
    return np.concatenate(found)


def test_the_golden_is_of_the_text(checkpoint: Checkpoint, golden: tuple[I32, object]) -> None:
    tokens = tokenizer_of(checkpoint).encode(text(), add_special_tokens=False)
    assert golden[0].tolist() == tokens
    assert len(tokens) > 2400


def test_the_golden_is_the_oracles(
    checkpoint: Checkpoint, golden: tuple[I32, npt.NDArray[np.float32]]
) -> None:
    tokens, expected = golden
    oracle = ReferenceDevice(build_graph(checkpoint.config), checkpoint.tensors)
    few = 48
    found = surprise(oracle.forward(tokens[:few]), tokens[1 : few + 1])
    np.testing.assert_allclose(found, expected[:few], atol=1e-3)


def test_perplexity_is_within_half_a_percent_of_the_oracles(
    device: CpuDevice, golden: tuple[I32, npt.NDArray[np.float32]]
) -> None:
    tokens = golden[0][: NUM_TOKENS.get(device.isa, OTHER)]
    expected = golden[1][: len(tokens) - 1].astype(np.float64)
    found = surprise_of(device, tokens)
    ratio = np.exp(found.mean() - expected.mean())
    assert 5 < np.exp(expected.mean()) < 50
    assert abs(ratio - 1) < 0.005, f"{len(tokens)} tokens: perplexity {ratio:.5f} times the oracle's"
    # A few badly predicted tokens could hide behind the mean.
    assert np.abs(found - expected).max() < 0.5
