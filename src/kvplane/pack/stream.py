"""A blob of rows read once, some layers at a time: each piece is hashed and copied while it is hot.

    file      | header | layer 0 | layer 1 | layer 10 | layer 11 | layer 2 | ...
    buffer             |-------------------|---------------------|-----          one piece at a time
                        read, hash, copy out

What is hashed is what is copied: a file that changes meanwhile cannot change it. Only when all of
it was hashed is anything of it believed.
"""

from collections.abc import Sequence

import numpy as np

from kvplane.geometry import LayerGroup
from kvplane.pack.blob import (
    Memory,
    expected_header,
    header_limit,
    layers_in_order,
    says,
)
from kvplane.pack.copies import Words, word
from kvplane.pack.encoding import hasher
from kvplane.pack.target import Task
from kvplane.storage import Reading

# fits in a core's second-level cache; smaller ones cost more calls than they save
PIECE_NBYTES = 1 << 20


def copied(
    file: Reading, blob: str, group: LayerGroup, tasks: Sequence[Task], memory: Memory
) -> bool:
    """Whether a blob was what its name and its tasks say; its rows are then in place.

    Where it was not, rows were written that nobody may see, and somebody has to find out why.

    Raises:
        PackCorrupt: it ends before its size.
        StorageError: it cannot be read.
    """
    lead = memory(min(file.nbytes, header_limit(group)))
    file.read_into(lead)
    held = says(lead)
    if held is None:
        return False
    header = expected_header(group, held)
    layer_nbytes = len(held) * group.row_nbytes
    good = (
        file.nbytes == len(header) + len(group.layers) * layer_nbytes
        and bytes(lead[: len(header)]) == header
        and all(
            task.target.group == group
            and held.start <= task.span.first
            and task.span.stop <= held.stop
            for task in tasks
        )
    )
    if not good:
        return False
    state = hasher()
    state.update(header)
    copies = [
        (task.target, parts)
        for task in tasks
        if (parts := task.target.parts(held, task.first, task.stop))
    ]
    layers = layers_in_order(group)
    together = max(1, PIECE_NBYTES // layer_nbytes)
    at = len(header)
    for begin in range(0, len(layers), together):
        some = layers[begin : begin + together]
        piece = memory(len(some) * layer_nbytes)
        file.read_into(piece, first=at)
        at += len(piece)
        state.update(piece)
        keys, values = _rows(piece, group, len(some), len(held))
        for number, layer in enumerate(some):
            for target, parts in copies:
                target.take(layer, keys[number], values[number], parts)
    return state.hexdigest() == blob


def _rows(
    piece: bytearray | memoryview, group: LayerGroup, num_layers: int, count: int
) -> tuple[Words, Words]:
    """The keys and values of the layers in a piece, `[layers, count, kv_heads, words]`."""
    heads = group.num_kv_heads
    found = []
    first = 0
    for dim in (group.head_dim, group.value_head_dim):
        nbytes = dim * group.itemsize
        kind = word(nbytes)
        found.append(
            np.ndarray(
                (num_layers, count, heads, nbytes // kind.itemsize),
                kind,
                buffer=piece,
                offset=first,
                strides=(count * group.row_nbytes, heads * nbytes, nbytes, kind.itemsize),
            )
        )
        first += count * heads * nbytes
    return found[0], found[1]
