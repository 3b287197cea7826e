"""The seam between checkpoint formats and devices: named tensors read one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loadproof.graph import Param

BF16 = npt.NDArray[ml_dtypes.bfloat16]
F32 = npt.NDArray[np.float32]
Array = F32 | BF16


class WeightsError(ValueError):
    """A checkpoint that cannot be used as it is: a missing, misshapen, truncated or hostile part."""


class TensorSource(Protocol):
    """Tensors of one checkpoint under their Hugging Face names; opening it reads headers only."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""

    def read(self, name: str) -> Array:
        """One tensor, ``[out, in]`` for matrices: bfloat16 where it is stored so, else float32.

        Values of formats narrower than float32 are widened exactly (float16, block-quantised integers).
        The array may be a read-only view of the file. Safe to call from several threads.
        """

    def read_bf16(self, name: str) -> BF16:
        """The same as ``read(name).astype(bfloat16)``, rounded to nearest even, without the float32 copy."""

    def digest(self) -> str:
        """SHA-256 hex digest that names the weights (of the files' bytes, or of a fast stand-in that
        changes whenever the bytes do: see the format's reader)."""


@dataclass(frozen=True)
class RenamedSource:
    """A part of ``source`` under other names: ``names`` maps each new name to the one in ``source``."""

    source: TensorSource
    names: Mapping[str, str]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every renamed tensor."""
        shapes = self.source.shapes()
        return {name: shapes[stored] for name, stored in self.names.items()}

    def read(self, name: str) -> Array:
        """See :meth:`TensorSource.read`."""
        return self.source.read(self._stored(name))

    def read_bf16(self, name: str) -> BF16:
        """See :meth:`TensorSource.read_bf16`."""
        return self.source.read_bf16(self._stored(name))

    def digest(self) -> str:
        """Digest of the whole underlying source."""
        return self.source.digest()

    def _stored(self, name: str) -> str:
        if name not in self.names:
            raise WeightsError(f"the checkpoint has no tensor {name}")
        return self.names[name]


def check_params(source: TensorSource, params: Iterable[Param]) -> None:
    """Raise :class:`WeightsError` naming the first tensors that are missing or of another shape."""
    shapes = source.shapes()
    problems = []
    for param in params:
        if param.name not in shapes:
            problems.append(f"{param.name} is missing")
        elif shapes[param.name] != param.shape:
            problems.append(f"{param.name} has shape {shapes[param.name]}, not {param.shape}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise WeightsError("the checkpoint does not fit its config: " + "; ".join(problems[:5]) + more)
