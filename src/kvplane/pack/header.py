"""The header of a safetensors file, written in one way and read without believing it.

u64 LE          length of the header, a multiple of 8
header          {"__metadata__":{"kvplane":<JSON>},<tensors>}, blank-padded
data            the tensors in the header's order, without gaps
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvplane.errors import PackCorrupt, PackTooLarge
from kvplane.pack.encoding import canonical, check_same, json_text, parsed
from kvplane.pack.limits import HEADER_NBYTES, TENSOR_AXES
from kvplane.pack.strict import loaded

PREFIX_NBYTES = 8
ALIGNMENT = 8
ITEMSIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


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


def written_header(metadata: Mapping[str, Any], entries: Sequence[Entry]) -> bytes:
    """The bytes before the data: length and padded text."""
    return joined_header(metadata, entries_text(entries))


def entries_text(entries: Sequence[Entry]) -> bytes:
    """What a header says of its tensors, without the outer braces."""
    fields = {
        entry.name: {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.first, entry.stop],
        }
        for entry in entries
    }
    return json_text(fields, sort_keys=False)[1:-1]


def joined_header(metadata: Mapping[str, Any], entries: bytes) -> bytes:
    """The bytes before the data, of what `entries_text` gave."""
    # the metadata's value is JSON in a string, as safetensors wants it
    own = json_text({"__metadata__": {"kvplane": canonical(metadata).decode()}}, sort_keys=False)
    text = _padded(own[:-1] + (b"," + entries if entries else b"") + b"}")
    return len(text).to_bytes(PREFIX_NBYTES, "little") + text


def header_of(data: memoryview | bytearray | bytes, path: str) -> Header:
    """A file's header, with every length checked against the file.

    Raises:
        PackCorrupt, PackTooLarge, PackVersion: names the lie.
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
    fields, doubt = loaded(text, path)
    metadata = _metadata(fields, path)
    if doubt is not None:
        raise PackCorrupt(path=path, what=f"its header has what no header has: {doubt}")
    entries = _entries(fields, size - PREFIX_NBYTES - length, path)
    check_same(text.rstrip(b" "), fields, path, sort_keys=False)
    if length % ALIGNMENT or _padded(text.rstrip(b" ")) != text:
        raise PackCorrupt(path=path, what="its header is not in canonical form: padding")
    return Header(metadata, entries, PREFIX_NBYTES + length)


def _padded(text: bytes) -> bytes:
    return text + b" " * (-len(text) % ALIGNMENT)


def _metadata(fields: Any, path: str) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    if not isinstance(fields, dict) or list(fields)[:1] != ["__metadata__"]:
        raise PackCorrupt(path=path, what="its header does not begin with __metadata__")
    own = fields["__metadata__"]
    if not isinstance(own, dict) or list(own) != ["kvplane"] or not isinstance(own["kvplane"], str):
        raise PackCorrupt(path=path, what="its metadata is not one entry named kvplane")
    try:
        text = own["kvplane"].encode()
    except ValueError as error:
        raise PackCorrupt(path=path, what=f"no text in UTF-8: {error}") from error
    return parsed(text, path)


def _entries(fields: dict[str, Any], nbytes: int, path: str) -> tuple[Entry, ...]:
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
    names = [entry.name for entry in entries]
    if names != sorted(names):
        raise PackCorrupt(path=path, what="its tensors are not in the order of their names")
    return tuple(entries)


def _entry(name: str, facts: Any, path: str) -> Entry:  # noqa: ANN401
    if not isinstance(facts, dict) or list(facts) != ["dtype", "shape", "data_offsets"]:
        raise PackCorrupt(path=path, what=f"{name} is not described as dtype, shape, data_offsets")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise PackCorrupt(path=path, what=f"{name} has dtype {str(dtype)[:20]!r}")
    good = _are_counts(shape) and _are_counts(offsets)
    # a product of many large numbers is itself a way to hang
    if not good or len(shape) > TENSOR_AXES or len(offsets) != 2:  # noqa: PLR2004 - first, stop
        raise PackCorrupt(path=path, what=f"{name} has no shape, or no offsets")
    nbytes = math.prod(shape) * ITEMSIZES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        what = f"{name} claims {offsets[1] - offsets[0]} bytes, its shape {nbytes}"
        raise PackCorrupt(path=path, what=what)
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
