"""What the ``tokenizers`` library raises, as errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loadproof.tokenizer.errors import TokenizerError

_PANICS = "pyo3_runtime"  # where the exceptions live that stand for a panic of Rust code


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Turn what the library raises into :class:`TokenizerError`, ``problem`` before its own words.

    It raises ``Exception`` itself, and where it meets what it never expected, a panic: a ``BaseException``,
    so that no ``except Exception`` would hold it. Interrupts and the like pass through.
    """
    try:
        yield
    except (TokenizerError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != _PANICS:
            raise
        raise TokenizerError(f"{problem}: {error}") from error
