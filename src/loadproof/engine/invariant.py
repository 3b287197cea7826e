"""Checks of the engine's own books, for those that an ``assert`` would leave out under ``-O``."""

from __future__ import annotations


class IntegrityError(AssertionError):
    """The engine's bookkeeping contradicts itself."""


def require(holds: bool, message: str, *values: object) -> None:
    """Raise :class:`IntegrityError` unless an invariant holds.

    ``values`` fill the braces of ``message``, which is put together only if it is needed.
    """
    if not holds:
        raise IntegrityError(message.format(*values))
