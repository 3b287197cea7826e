from __future__ import annotations

import io
import sys

import pytest

from loadproof.engine.progress import progress_bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "show", "shown"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_bar_is_shown_to_a_person_who_wants_it(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, show: bool, shown: bool
) -> None:
    stderr = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress_bar(3, show=show) as progress:
        for _ in range(3):
            progress.advance(7)
    assert ("3/3" in stderr.getvalue()) == shown
    assert ("tokens/s" in stderr.getvalue()) == shown


def test_no_requests_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := _Terminal())
    with progress_bar(0) as progress:
        progress.advance(1)
    assert stderr.getvalue() == ""
