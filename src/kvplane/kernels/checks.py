"""What the row kernels refuse before they touch a row."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, TensorMismatch


class RowPlane(Protocol):
    """Whatever has rows: key `[batch, row, kv_head, head_dim]`, value likewise, any strides."""

    key: Tensor
    value: Tensor


def checked_rows(plane: RowPlane, rows: object) -> list[int]:
    """The rows as numbers.

    Raises:
        TensorMismatch: not int64 `[tokens]` on the plane's device.
        ArgumentError: a row outside the plane, or named twice: with two sources for one row it is
            undefined which one stays.
    """
    if not isinstance(rows, Tensor) or rows.dtype is not torch.int64 or rows.ndim != 1:
        raise TensorMismatch(layer=None, what="rows", expected="int64 [tokens]", got=_told(rows))
    if rows.device != plane.key.device:
        raise TensorMismatch(
            layer=None, what="rows device", expected=plane.key.device, got=rows.device
        )
    numbers: list[int] = rows.tolist()
    capacity = plane.key.shape[1]
    for row in numbers:
        if not 0 <= row < capacity:
            raise ArgumentError(argument="rows", expected=f"within [0, {capacity})", got=row)
    if len(set(numbers)) < len(numbers):
        raise ArgumentError(argument="rows", expected="distinct rows", got=numbers)
    return numbers


def check_source(plane: RowPlane, count: int, key: object, value: object) -> None:
    """Refuse what is not `count` rows of the plane: TensorMismatch."""
    for what, source, target in (("key", key, plane.key), ("value", value, plane.value)):
        if not isinstance(source, Tensor):
            raise TensorMismatch(layer=None, what=what, expected="a tensor", got=_told(source))
        wanted = (target.shape[0], count, *target.shape[2:])
        _same(what, "shape", wanted, tuple(source.shape))
        _same(what, "device", target.device, source.device)
        if source.dtype not in (target.dtype, torch.float32):
            raise TensorMismatch(
                layer=None,
                what=f"{what} dtype",
                expected=f"{target.dtype} or torch.float32",
                got=source.dtype,
            )


def run_of(rows: Sequence[int]) -> range | None:
    """The rows as one run of consecutive ones, if they are that."""
    if not rows or list(rows) != list(range(rows[0], rows[0] + len(rows))):
        return None
    return range(rows[0], rows[0] + len(rows))


def _same(what: str, field: str, expected: object, got: object) -> None:
    if expected != got:
        raise TensorMismatch(layer=None, what=f"{what} {field}", expected=expected, got=got)


def _told(thing: object) -> str:
    if isinstance(thing, Tensor):
        return f"{thing.dtype} {list(thing.shape)}"
    return type(thing).__name__
