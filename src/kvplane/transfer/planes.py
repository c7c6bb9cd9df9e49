"""Rows as the bytes of a segment, and back.

    NHD   row by row: its key heads, then its value heads
    HND   head by head, keys before values: that head's rows

A plane of the same layout has a segment's bytes as they are: they go from and into its memory
without a copy. Any other way rows are copied once, through memory of their own.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvplane.geometry import LayerGroup
from kvplane.kernels.rounding import converted
from kvplane.plan import DTYPES
from kvplane.plane import Layout, Plane

KeyValue = tuple[Tensor, Tensor]


class PlaneBytes:
    """The memory of one plane, in the order in which a segment has it.

    Args:
        plane: of one sequence, in the machine's own memory.
    """

    def __init__(self, plane: Plane) -> None:
        self._shape = plane.shape
        self._bytes = plane.span.tensor().numpy().data

    def pieces(self, runs: Sequence[range]) -> list[memoryview]:
        """The bytes of rows, in the order of the runs; nothing is copied."""
        parts = [self._shape.byte_ranges(run) for run in runs]
        # head by head, each with all of its runs
        ordered = [part for alike in zip(*parts, strict=True) for part in alike]
        return [self._bytes[part.start : part.stop] for part in ordered]


def is_direct(plane: Plane) -> bool:
    """Whether a plane's bytes can go to and from a link as they lie."""
    return plane.key.device.type == "cpu" and plane.shape.batch == 1


def rows_in(
    data: Tensor, group: LayerGroup, num_rows: int, *, layout: str, dtype: torch.dtype
) -> KeyValue:
    """Views of one layer's rows in a segment's bytes, `[1, rows, kv_heads, dim]`.

    Args:
        data: uint8, of that layer.
        group: the layer's.
        num_rows: how many.
        layout: "NHD" or "HND".
        dtype: of the elements.
    """
    heads, dim, value_dim = group.num_kv_heads, group.head_dim, group.value_head_dim
    elements = data.view(dtype)
    if layout == Layout.TOKEN_MAJOR.value:
        rows = elements.view(1, num_rows, heads * (dim + value_dim))
        key, value = torch.split(rows, [heads * dim, heads * value_dim], dim=2)
        return (
            key.view(1, num_rows, heads, dim),
            value.view(1, num_rows, heads, value_dim),
        )
    key, value = torch.split(elements, [heads * num_rows * dim, heads * num_rows * value_dim])
    return (
        key.view(1, heads, num_rows, dim).transpose(1, 2),
        value.view(1, heads, num_rows, value_dim).transpose(1, 2),
    )


def layers_of(data: Tensor, num_layers: int) -> Iterator[Tensor]:
    """The bytes of each layer of a segment."""
    yield from data.view(num_layers, -1)


def packed(plane: Plane, group: LayerGroup, runs: Sequence[range], *, layout: str) -> memoryview:
    """Rows of a plane, wherever it lies, copied into memory of this machine."""
    num_rows = sum(map(len, runs))
    data = torch.empty(num_rows * group.row_nbytes, dtype=torch.uint8)
    key, value = rows_in(data, group, num_rows, layout=layout, dtype=plane.shape.dtype)
    done = 0
    for from_key, from_value in plane.spans(runs):
        count = from_key.shape[1]
        key.narrow(1, done, count).copy_(from_key)
        value.narrow(1, done, count).copy_(from_value)
        done += count
    return data.numpy().data


def stored(
    plane: Plane,
    runs: Sequence[range],
    data: Tensor,
    group: LayerGroup,
    *,
    layout: str,
) -> None:
    """Copy one layer's rows of a segment into a plane, its dtype into the plane's where exact."""
    num_rows = sum(map(len, runs))
    rows = rows_in(data, group, num_rows, layout=layout, dtype=DTYPES[group.dtype])
    key, value = (converted(part, plane.shape.dtype, what="a segment's rows") for part in rows)
    device = plane.key.device
    plane.store(runs, key.to(device), value.to(device))
