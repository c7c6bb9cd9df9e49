"""Blobs: rows of one layer group inside one block, as a safetensors file named by its digest.

    u64 LE          length of the header
    header          {"__metadata__":{"kvplane":<JSON>},<tensors>}, blank-padded to a multiple of 8
    data            the tensors in the header's order, without gaps

One set of rows has one sequence of bytes: our own header writer, keys in a fixed order. The
safetensors library reads it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvplane.errors import PackCorrupt, PackTooLarge
from kvplane.geometry import LayerGroup
from kvplane.pack.encoding import canonical, digest, is_hex, parsed
from kvplane.pack.limits import BLOCK, FORMAT, HEADER_NBYTES

PREFIX_NBYTES = 8
CODEC = "raw"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
GROUP_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
STATE_DTYPES = {
    **DTYPE_NAMES,
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


class Entry(NamedTuple):
    """One tensor as a header describes it: where its bytes lie in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    stop: int


class Header(NamedTuple):
    """A blob's header.

    Args:
        metadata: what the blob says of itself.
        entries: its tensors, in the order of their bytes.
        data_first: where the data begins in the file.
    """

    metadata: dict[str, Any]
    entries: tuple[Entry, ...]
    data_first: int


def blob_name(digest_hex: str) -> str:
    """The file of a blob."""
    return f"blobs/{digest_hex[:2]}/{digest_hex}.safetensors"


def row_metadata(group_id: str, first: int, count: int) -> dict[str, Any]:
    """What a blob of rows says of itself."""
    return {"codec": CODEC, "count": count, "first": first, "format": FORMAT, "group": group_id}


def row_blob(
    group: LayerGroup, first: int, rows: Mapping[int, Sequence[tuple[Tensor, Tensor]]]
) -> bytearray:
    """The bytes of a blob of rows from position `first` on.

    Args:
        group: whose rows.
        first: position.
        rows: by layer: spans of key and value, `[rows, kv_heads, dim]`, in order.
    """
    count = sum(key.shape[0] for key, _ in rows[group.layers[0]])
    tensors = []
    for layer in group.layers:
        for what, spans in (
            ("key", [key for key, _ in rows[layer]]),
            ("value", [value for _, value in rows[layer]]),
        ):
            tensors.append((f"layers.{layer}.{what}", spans))
    return _written(row_metadata(group.id, first, count), tensors, DTYPE_NAMES)


def state_blob(position: int, tensors: Mapping[str, Tensor]) -> bytearray:
    """The bytes of a blob with the states of recurrent and convolution layers at a position.

    Args:
        position: where they were.
        tensors: by "layers.<i>.<name>".
    """
    metadata = {"codec": CODEC, "format": FORMAT, "group": "state", "position": position}
    # scalars have no axis to lay spans along
    named = [(name, [tensors[name]]) for name in sorted(tensors)]
    return _written(metadata, named, STATE_DTYPES)


def _written(
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, Sequence[Tensor]]],
    names: Mapping[torch.dtype, str],
) -> bytearray:
    entries = {}
    offset = 0
    for name, spans in tensors:
        shape = list(spans[0].shape)
        if len(spans) > 1:
            shape[0] = sum(span.shape[0] for span in spans)
        nbytes = sum(span.nbytes for span in spans)
        entries[name] = {
            "dtype": names[spans[0].dtype],
            "shape": shape,
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    # the metadata's value is JSON in a string, as safetensors wants it
    header = {"__metadata__": {"kvplane": canonical(metadata).decode()}, **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = bytearray(PREFIX_NBYTES + len(text) + offset)
    data[:PREFIX_NBYTES] = len(text).to_bytes(PREFIX_NBYTES, "little")
    data[PREFIX_NBYTES : PREFIX_NBYTES + len(text)] = text
    if offset:
        flat = torch.frombuffer(data, dtype=torch.uint8, offset=PREFIX_NBYTES + len(text))
        first = 0
        for _, spans in tensors:
            for span in spans:
                if span.nbytes:
                    part = flat[first : first + span.nbytes]
                    _as_dtype(part, span.dtype).view(span.shape).copy_(span)
                    first += span.nbytes
    return data


def _as_dtype(flat: Tensor, dtype: torch.dtype) -> Tensor:
    return flat.view(dtype) if dtype != torch.uint8 else flat


def header_of(data: memoryview | bytearray | bytes, path: str) -> Header:
    """A blob's header, with every length checked against the file.

    Raises:
        PackCorrupt, PackTooLarge: names the lie.
    """
    size = len(data)
    if size < PREFIX_NBYTES:
        raise PackCorrupt(path=path, what=f"holds {size} bytes, fewer than a header's length")
    length = int.from_bytes(data[:PREFIX_NBYTES], "little")
    if length > HEADER_NBYTES:
        raise PackTooLarge(what=f"{path}: header", limit=HEADER_NBYTES, got=length)
    if PREFIX_NBYTES + length > size:
        raise PackCorrupt(path=path, what=f"its header claims {length} of {size} bytes")
    text = bytes(data[PREFIX_NBYTES : PREFIX_NBYTES + length])
    try:
        fields = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise PackCorrupt(path=path, what=f"its header is no JSON: {error}") from error
    metadata, entries = _checked(fields, size - PREFIX_NBYTES - length, path)
    expected = {"__metadata__": fields["__metadata__"], **{e.name: fields[e.name] for e in entries}}
    written = json.dumps(expected, separators=(",", ":"), ensure_ascii=False).encode()
    if length % 8 or written + b" " * (-len(written) % 8) != text:
        raise PackCorrupt(path=path, what="its header is not in canonical form")
    return Header(metadata, entries, PREFIX_NBYTES + length)


def _checked(fields: Any, nbytes: int, path: str) -> tuple[dict[str, Any], tuple[Entry, ...]]:  # noqa: ANN401
    if not isinstance(fields, dict) or list(fields)[:1] != ["__metadata__"]:
        raise PackCorrupt(path=path, what="its header does not begin with __metadata__")
    own = fields["__metadata__"]
    if not isinstance(own, dict) or list(own) != ["kvplane"] or not isinstance(own["kvplane"], str):
        raise PackCorrupt(path=path, what="its metadata is not one entry named kvplane")
    metadata = parsed(own["kvplane"].encode(), path)
    entries = []
    end = 0
    for name, facts in fields.items():
        if name == "__metadata__":
            continue
        entry = _entry(name, facts, path)
        if entry.first != end:
            raise PackCorrupt(path=path, what=f"{name} begins at byte {entry.first}, not {end}")
        end = entry.stop
        entries.append(entry)
    if end != nbytes:
        raise PackCorrupt(path=path, what=f"its tensors have {end} bytes, the file {nbytes}")
    return metadata, tuple(entries)


def _entry(name: str, facts: Any, path: str) -> Entry:  # noqa: ANN401
    if not isinstance(facts, dict) or list(facts) != ["dtype", "shape", "data_offsets"]:
        raise PackCorrupt(path=path, what=f"{name} is not described as dtype, shape, data_offsets")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    sizes = {text: kind.itemsize for kind, text in STATE_DTYPES.items()}
    if not isinstance(dtype, str) or dtype not in sizes:
        raise PackCorrupt(path=path, what=f"{name} has dtype {dtype!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:  # noqa: PLR2004 - first, stop
        raise PackCorrupt(path=path, what=f"{name} has shape {shape!r} at {offsets!r}")
    nbytes = math.prod(shape) * sizes[dtype]
    if offsets[1] - offsets[0] != nbytes:
        what = f"{name} claims {offsets[1] - offsets[0]} bytes, its shape {nbytes}"
        raise PackCorrupt(path=path, what=what)
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 53 for value in values
    )


def check_rows(header: Header, group: LayerGroup, path: str) -> range:
    """The positions that a blob of a group's rows holds.

    Raises:
        PackCorrupt: metadata or tensors are not those of such a blob.
    """
    metadata = header.metadata
    if set(metadata) != {"codec", "count", "first", "format", "group"}:
        raise PackCorrupt(path=path, what=f"its metadata has the fields {sorted(metadata)}")
    first, count = metadata["first"], metadata["count"]
    if metadata["codec"] != CODEC or metadata["group"] != group.id:
        what = f"holds {metadata['codec']} rows of {metadata['group']}, not raw ones of {group.id}"
        raise PackCorrupt(path=path, what=what)
    good = type(first) is int and type(count) is int and first >= 0 and count >= 1
    if not good or first // BLOCK != (first + count - 1) // BLOCK:
        raise PackCorrupt(path=path, what=f"{count!r} rows from {first!r} are not in one block")
    dtype = GROUP_DTYPES[group.dtype]
    expected = []
    for layer in group.layers:
        for what, dim in (("key", group.head_dim), ("value", group.value_head_dim)):
            expected.append((f"layers.{layer}.{what}", dtype, (count, group.num_kv_heads, dim)))
    if [(entry.name, entry.dtype, entry.shape) for entry in header.entries] != expected:
        raise PackCorrupt(
            path=path, what=f"its tensors are not those of {count} rows of {group.id}"
        )
    return range(first, first + count)


def tensors_of(header: Header, data: bytearray) -> Iterable[tuple[str, Tensor]]:
    """A blob's tensors, as views of its bytes."""
    kinds = {text: kind for kind, text in STATE_DTYPES.items()}
    flat = torch.frombuffer(data, dtype=torch.uint8)
    for entry in header.entries:
        first = header.data_first + entry.first
        part = flat[first : header.data_first + entry.stop]
        dtype = kinds[entry.dtype]
        if part.numel() == 0:
            yield entry.name, torch.zeros(entry.shape, dtype=dtype)
        elif first % dtype.itemsize:
            yield entry.name, _as_dtype(part.clone(), dtype).view(entry.shape)
        else:
            yield entry.name, _as_dtype(part, dtype).view(entry.shape)


def check_digest(data: bytearray, digest_hex: str, path: str) -> None:
    """Refuse bytes that are not those of the name: PackCorrupt."""
    got = digest(data).hex()
    if got != digest_hex or not is_hex(digest_hex):
        raise PackCorrupt(path=path, what=f"its bytes have the digest {got[:16]}...")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        message = "a key stands twice"
        raise ValueError(message)
    return value
