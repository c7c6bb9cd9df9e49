"""Which kernels copy rows on a device: chosen once for a plane.

On a GPU one Triton launch stores a step's rows of keys and values, wherever the seam is; without
Triton, PyTorch's copies do.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvplane.kernels import staged, vectorized
from kvplane.kernels.checks import RowPlane

Store = Callable[[RowPlane, Sequence[range], Tensor, Tensor], None]


@cache
def store_of(kind: str) -> Store:
    """What stores consecutive rows, `[batch, tokens, kv_head, dim]`, on a kind of device."""
    return _on_gpu(_triton()) if kind == "cuda" else store_runs


def store_runs(plane: RowPlane, runs: Sequence[range], key: Tensor, value: Tensor) -> None:
    """Copy rows in the order of runs, with PyTorch's copies."""
    if len(runs) == 1:
        vectorized.store_run(plane, runs[0], key, value)
        return
    done = 0
    for run in runs:
        part = key.narrow(1, done, len(run)), value.narrow(1, done, len(run))
        vectorized.store_run(plane, run, *part)
        done += len(run)


def _triton() -> Store:
    try:
        from kvplane.kernels import triton_rows  # noqa: PLC0415 - only on a GPU
    except ImportError:
        return store_runs
    return triton_rows.store_runs


def _on_gpu(store: Store) -> Store:
    def stored(plane: RowPlane, runs: Sequence[range], key: Tensor, value: Tensor) -> None:
        if not runs:
            return
        if key.device.type == "cpu":
            staged.put_in(plane, runs, key, value, store=store)
        else:
            store(plane, runs, key, value)

    return stored


def taken_out(
    planes: Sequence[tuple[RowPlane, Sequence[range]]], device: torch.device | str
) -> list[tuple[Tensor, Tensor]] | None:
    """Rows of a GPU's planes in the host's memory; None for any other way."""
    here = planes[0][0].key.device.type if planes else "cpu"
    if here != "cuda" or torch.device(device).type != "cpu":
        return None
    return staged.taken_out(planes)
