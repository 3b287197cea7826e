"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from loadproof.weights.resolve import resolve_model

# A busy machine is no failure.
settings.register_profile("loadproof", deadline=None)
settings.load_profile("loadproof")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's file, for tests marked ``real_model``; fetched once where it isn't there yet."""
    return resolve_model("smollm2-135m")
