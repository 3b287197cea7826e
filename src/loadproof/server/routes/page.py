"""The page at ``/``, and what it shows of the engine."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
