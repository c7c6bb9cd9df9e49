"""Rows with PyTorch's own copies, on any device."""

from typing import Protocol

from torch import Tensor


class RowPlane(Protocol):
    """Whatever has rows: key `[batch, row, kv_head, head_dim]`, value likewise, any strides."""

    key: Tensor
    value: Tensor


def store_run(plane: RowPlane, run: range, key: Tensor, value: Tensor) -> None:
    """Copy rows in at consecutive rows."""
    plane.key.narrow(1, run.start, len(run)).copy_(key)
    plane.value.narrow(1, run.start, len(run)).copy_(value)
