from __future__ import annotations

import hashlib
import io
import sys
import threading

import numpy as np
import pytest

from loadproof.weights import chunks
from loadproof.weights.chunks import pieces, run_shares, tree_digest
from loadproof.weights.progress import byte_progress

MIB = 1 << 20


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(chunks, "_num_threads", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 1000])
def test_shares_cover_everything_once(num_threads: int, count: int) -> None:
    lock, seen, sizes = threading.Lock(), [0] * count, []

    def work(start: int, stop: int) -> None:
        with lock:
            sizes.append(stop - start)
            for i in range(start, stop):
                seen[i] += 1

    run_shares(count, 10, work)
    assert seen == [1] * count
    assert len(sizes) == max(1, min(num_threads, count // 10))
    assert count < 10 or min(sizes) >= 10


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_failing_share_raises_after_the_others_are_done(num_threads: int, bad: int) -> None:
    finished: list[int] = []

    def work(start: int, stop: int) -> None:
        if start <= bad * 20 < stop:
            raise ValueError(f"share of {bad}")
        finished.append(start)

    with pytest.raises(ValueError, match=f"share of {bad}"):
        run_shares(100, 10, work)
    assert len(finished) == num_threads - 1


def test_pieces() -> None:
    assert list(pieces(3, 10, 4)) == [slice(3, 7), slice(7, 10)]
    assert list(pieces(3, 3, 4)) == []


def test_tree_digest(num_threads: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 9 * MIB + 5, np.uint8)
    parts = [data[: 4 * MIB], data[4 * MIB : 8 * MIB], data[8 * MIB :]]
    expected = hashlib.sha256(b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts)).hexdigest()
    assert tree_digest([data.data]) == expected
    assert tree_digest([parts[0].data, data[4 * MIB :].data]) == expected
    data[-1] ^= 1
    assert tree_digest([data.data]) != expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_is_shown_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with byte_progress("fetching tiny", 1000, wanted) as show:
        show(500)
    assert ("fetching tiny" in screen.getvalue()) == wanted


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress("fetching tiny", 1000, True) as show:
        show(500)
    assert capsys.readouterr() == ("", "")
