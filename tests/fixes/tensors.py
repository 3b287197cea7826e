"""The few operations of device tensors that the engines' methods use, over NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


class Tensor:
    """A whole-number tensor; slices and views share memory with it."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array, dtype=np.int32)
        self.copied_from: list[np.ndarray[Any, Any]] = []

    def __getitem__(self, key: Any) -> Tensor:
        part = Tensor(self.array[key])
        part.copied_from = self.copied_from
        return part

    def __setitem__(self, key: Any, value: Tensor) -> None:
        self.array[key] = value.array

    def view(self, *shape: int) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def clone(self) -> Tensor:
        return Tensor(self.array.copy())

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            self.copied_from.append(source.array)
        self.array[...] = source.array
        return self

    def tolist(self) -> Any:
        return self.array.tolist()


class Torch:
    """Stands in for the module ``torch``."""

    @staticmethod
    def zeros(shape: Any) -> Tensor:
        return Tensor(np.zeros(shape))

    @staticmethod
    def split(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        if sum(sizes) != tensor.array.shape[0]:
            raise ValueError("the sizes don't add up to the tensor's")
        ends = np.cumsum(sizes)
        return [tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def pad_sequence(rows: list[Tensor], batch_first: bool, padding_value: int) -> Tensor:
    assert batch_first
    padded = np.full((len(rows), max(len(row.array) for row in rows)), padding_value)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values.array)] = values.array
    return Tensor(padded)


def async_h2d_copy(source: Tensor, dest_tensor: Tensor | None = None) -> Tensor:
    if dest_tensor is None:
        return source.clone()
    return dest_tensor.copy_(source, non_blocking=True)


TORCH_LIKE: dict[str, Any] = {"torch": Torch, "pad_sequence": pad_sequence, "async_h2d_copy": async_h2d_copy}
