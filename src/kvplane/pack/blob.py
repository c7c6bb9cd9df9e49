"""Blobs: rows of one layer group inside one block, as a safetensors file named by its digest.

One set of rows has one sequence of bytes: our own header, tensors in the order of their names. The
safetensors library reads it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, PackCorrupt
from kvplane.geometry import LayerGroup
from kvplane.pack.copies import copy_out
from kvplane.pack.encoding import digest, is_hex
from kvplane.pack.header import (
    Entry,
    Header,
    entries_text,
    header_of,
    joined_header,
    written_header,
)
from kvplane.pack.limits import BLOCK, FORMAT, LAYERS, TOKENS

__all__ = [
    "Header",
    "Memory",
    "blob_name",
    "check_digest",
    "check_rows",
    "check_states",
    "expected_header",
    "header_limit",
    "header_of",
    "layers_in_order",
    "row_blob",
    "says",
    "state_blob",
    "tensors_of",
]

CODEC = "raw"
STATES = "state"
GROUP_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COUNT_AND_FIRST = re.compile(rb'"count\\":([0-9]{1,9}),\\"first\\":([0-9]{1,15}),')
_METADATA_NBYTES = 256
_STATE = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)

Memory = Callable[[int], bytearray | memoryview]


def blob_name(digest_hex: str) -> str:
    """The file of a blob."""
    return f"blobs/{digest_hex[:2]}/{digest_hex}.safetensors"


def row_metadata(group_id: str, first: int, count: int) -> dict[str, Any]:
    """What a blob of rows says of itself."""
    return {"codec": CODEC, "count": count, "first": first, "format": FORMAT, "group": group_id}


def state_metadata(position: int) -> dict[str, Any]:
    """What a blob of states says of itself."""
    return {"codec": CODEC, "format": FORMAT, "group": STATES, "position": position}


def row_tensors(group: LayerGroup, count: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor in a blob of rows, in the order of their names."""
    dtype = GROUP_DTYPES[group.dtype]
    return sorted(
        (f"layers.{layer}.{what}", dtype, (count, group.num_kv_heads, dim))
        for layer in group.layers
        for what, dim in (("key", group.head_dim), ("value", group.value_head_dim))
    )


@lru_cache(maxsize=64)
def row_entries(group: LayerGroup, count: int) -> tuple[Entry, ...]:
    """The tensors of a blob of rows as its header lists them."""
    entries = []
    end = 0
    for name, dtype, shape in row_tensors(group, count):
        nbytes = math.prod(shape) * group.itemsize
        entries.append(Entry(name, dtype, shape, end, end + nbytes))
        end += nbytes
    return tuple(entries)


@lru_cache(maxsize=64)
def _row_text(group: LayerGroup, count: int) -> bytes:
    return entries_text(row_entries(group, count))


def row_blob(
    group: LayerGroup,
    first: int,
    rows: Mapping[int, Sequence[tuple[Tensor, Tensor]]],
    *,
    memory: Memory = bytearray,
) -> bytearray | memoryview:
    """The bytes of a blob of rows from position `first` on.

    Args:
        group: whose rows.
        first: position.
        rows: by layer: spans of key and value, `[rows, kv_heads, dim]`, in order.
        memory: gives so many writable bytes to write the blob into.
    """
    count = sum(key.shape[0] for key, _ in rows[group.layers[0]])
    spans = {}
    for layer in group.layers:
        spans[f"layers.{layer}.key"] = [key for key, _ in rows[layer]]
        spans[f"layers.{layer}.value"] = [value for _, value in rows[layer]]
    metadata = row_metadata(group.id, first, count)
    return _written(metadata, row_entries(group, count), spans, memory)


def state_blob(
    position: int, states: Mapping[str, Tensor], *, memory: Memory = bytearray
) -> bytearray | memoryview:
    """The bytes of a blob with the states of recurrent and convolution layers at a position.

    Args:
        position: where they were.
        states: by "layers.<i>.<name>".
        memory: as in `row_blob`.

    Raises:
        ArgumentError: a name or dtype that no such blob has.
    """
    for name, tensor in states.items():
        if not _is_state(name) or tensor.dtype not in _NAMES:
            expected = f'"layers.<i>.<name>" to one of {sorted(DTYPES)}'
            raise ArgumentError(argument="states", expected=expected, got=(name, tensor.dtype))
    entries = []
    end = 0
    for name in sorted(states):
        tensor = states[name]
        nbytes = tensor.nbytes
        entries.append(Entry(name, _NAMES[tensor.dtype], tuple(tensor.shape), end, end + nbytes))
        end += nbytes
    spans = {name: [tensor] for name, tensor in states.items()}
    return _written(state_metadata(position), entries, spans, memory)


def _is_state(name: str) -> bool:
    found = _STATE.fullmatch(name)
    return found is not None and int(found[1]) < LAYERS


def _written(
    metadata: Mapping[str, Any],
    entries: Sequence[Entry],
    spans: Mapping[str, Sequence[Tensor]],
    memory: Memory,
) -> bytearray | memoryview:
    header = written_header(metadata, entries)
    end = entries[-1].stop if entries else 0
    data = memory(len(header) + end)
    data[: len(header)] = header
    at = len(header)
    for entry in entries:
        for span in spans[entry.name]:
            if span.nbytes:
                copy_out(span, data, at)
                at += span.nbytes
    return data


def check_rows(header: Header, group: LayerGroup, path: str) -> range:
    """The positions that a blob of a group's rows holds.

    Raises:
        PackCorrupt: metadata or tensors are not those of such a blob.
    """
    metadata = header.metadata
    if set(metadata) != {"codec", "count", "first", "format", "group"}:
        raise PackCorrupt(path=path, what=f"its metadata has the fields {sorted(metadata)[:8]}")
    first, count = metadata["first"], metadata["count"]
    if metadata["codec"] != CODEC or metadata["group"] != group.id:
        held = f"{str(metadata['codec'])[:20]} rows of {str(metadata['group'])[:80]}"
        raise PackCorrupt(path=path, what=f"holds {held}, not raw ones of {group.id}")
    good = type(first) is int and type(count) is int and first >= 0 and count >= 1
    if not good or first // BLOCK != (first + count - 1) // BLOCK:
        raise PackCorrupt(path=path, what=f"{count!r} rows from {first!r} are not in one block")
    found = [(entry.name, entry.dtype, entry.shape) for entry in header.entries]
    if found != row_tensors(group, count):
        raise PackCorrupt(
            path=path, what=f"its tensors are not those of {count} rows of {group.id}"
        )
    return range(first, first + count)


@lru_cache(maxsize=64)
def layers_in_order(group: LayerGroup) -> tuple[int, ...]:
    """A group's layers as a blob has them: by name, where 10 comes before 2."""
    names = [name for name, _, _ in row_tensors(group, 1)[::2]]
    return tuple(int(name.split(".")[1]) for name in names)


@lru_cache(maxsize=64)
def header_limit(group: LayerGroup) -> int:
    """Bytes that hold the header of any blob of a group's rows, its length included."""
    return len(expected_header(group, range(BLOCK * (TOKENS // BLOCK), TOKENS + BLOCK)))


def says(lead: bytearray | memoryview) -> range | None:
    """The positions that a file says it holds in its first bytes; None where it cannot be so."""
    found = _COUNT_AND_FIRST.search(lead, 0, _METADATA_NBYTES)
    if found is None:
        return None
    count, first = int(found[1]), int(found[2])
    if not 1 <= count <= BLOCK or first // BLOCK != (first + count - 1) // BLOCK:
        return None
    return range(first, first + count)


def expected_header(group: LayerGroup, held: range) -> bytes:
    """The one header of a blob with these rows: to compare is every check at once."""
    metadata = row_metadata(group.id, held.start, len(held))
    return joined_header(metadata, _row_text(group, len(held)))


def check_states(header: Header, position: int, path: str) -> None:
    """Refuse what are no states at that position: PackCorrupt."""
    if header.metadata != state_metadata(position):
        raise PackCorrupt(path=path, what=f"holds no states at position {position}")
    for entry in header.entries:
        if not _is_state(entry.name):
            raise PackCorrupt(path=path, what=f"{entry.name[:80]!r} is no layer's state")


def tensors_of(header: Header, data: bytearray | memoryview) -> Iterator[tuple[str, Tensor]]:
    """A blob's tensors, as views of its bytes where they are aligned."""
    flat = torch.frombuffer(data, dtype=torch.uint8)
    for entry in header.entries:
        dtype = DTYPES[entry.dtype]
        first = header.data_first + entry.first
        part = flat[first : header.data_first + entry.stop]
        if part.numel() == 0:
            yield entry.name, torch.zeros(entry.shape, dtype=dtype)
            continue
        if first % dtype.itemsize:
            part = part.clone()
        yield entry.name, part.view(dtype).view(entry.shape)


def check_digest(data: bytearray | memoryview, digest_hex: str, path: str) -> None:
    """Refuse bytes that are not those of the name: PackCorrupt."""
    got = digest(data).hex()
    if got != digest_hex or not is_hex(digest_hex):
        raise PackCorrupt(path=path, what=f"its bytes have the digest {got[:16]}...")
