"""What the tests of the fixes share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fixes.engines import NAMES, Engine, install


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each fix in turn."""
    found: str = request.param
    return found


@pytest.fixture
def engine(tmp_path: Path, name: str) -> Engine:
    """A faulty engine for each fix."""
    return install(tmp_path / "site-packages", name)
