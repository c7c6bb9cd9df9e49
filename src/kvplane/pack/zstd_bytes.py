"""Codec `zstd-bytes`: each tensor's bytes split by significance, each part one zstd frame.

    raw          layers.3.key  f16 [count, kv_heads, dim]
    zstd-bytes   layers.3.key.b0  u8 [n]   all least significant bytes, compressed
                 layers.3.key.b1  u8 [m]   all most significant bytes, compressed
    metadata     the raw blob's, with "codec" and "rows", the digest of the raw data

Signs and exponents repeat, mantissas hardly do: apart they compress better than together. Bytes
depend on zstd's version, rows do not: a reader gives back the raw blob, or refuses.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvplane.errors import ExtraMissing, PackCorrupt, PackTooLarge
from kvplane.geometry import FULL, SLIDING, LayerGroup
from kvplane.pack.blob import expected_header, header_of, row_entries
from kvplane.pack.encoding import digest, is_hex
from kvplane.pack.header import Entry, Header, written_header
from kvplane.pack.ids import facts_of
from kvplane.pack.limits import BLOCK, LAYERS

CODEC = "zstd-bytes"
LEVEL = 1
# where a header says its codec: a reader need not take it apart to know
LEAD_NBYTES = 64
_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(?:key|value)\.b[0-7]", re.ASCII)
_FIELDS = {"codec", "count", "first", "format", "group", "rows"}


def is_packed(lead: bytes | bytearray | memoryview) -> bool:
    """Whether a file's first bytes say that it is of this codec."""
    return CODEC.encode() in bytes(lead[:LEAD_NBYTES])


def packed(data: bytearray | memoryview, *, level: int = LEVEL) -> bytearray | None:
    """A raw blob of rows in this codec; None where it would be no shorter.

    Raises:
        ExtraMissing: zstandard is not installed.
    """
    compressor = _zstandard().ZstdCompressor(
        level=level, write_content_size=True, write_checksum=False
    )
    header = header_of(data, "the blob to be packed")
    view = memoryview(data)[header.data_first :]
    itemsize = _itemsize(header)
    frames: list[bytes] = []
    entries: list[Entry] = []
    end = 0
    for entry in header.entries:
        elements = np.frombuffer(view[entry.first : entry.stop], np.uint8).reshape(-1, itemsize)
        for number in range(itemsize):
            frame = compressor.compress(np.ascontiguousarray(elements[:, number]).data)
            frames.append(frame)
            name = f"{entry.name}.b{number}"
            entries.append(Entry(name, "U8", (len(frame),), end, end + len(frame)))
            end += len(frame)
    metadata = {**header.metadata, "codec": CODEC, "rows": digest(view).hex()}
    out = bytearray(written_header(metadata, entries))
    if len(out) + end >= len(data):
        return None
    for frame in frames:
        out += frame
    return out


def unpacked(data: bytearray | memoryview, path: str, *, limit: int) -> bytearray:
    """The raw blob that was packed: its header and rows.

    Args:
        data: the file, its digest verified.
        path: for messages.
        limit: bytes that the raw blob may have.

    Raises:
        PackCorrupt: metadata, tensors, frames or rows are not those of such a blob.
        PackTooLarge: the raw blob would be longer than `limit`; no memory was taken for it.
        ExtraMissing: zstandard is not installed.
    """
    zstandard = _zstandard()
    header = header_of(data, path)
    group, held, rows = _said(header, path)
    entries = row_entries(group, len(held))
    lead = expected_header(group, held)
    nbytes = len(lead) + entries[-1].stop
    if nbytes > limit:
        raise PackTooLarge(what=f"{path}, unpacked,", limit=limit, got=nbytes)
    expected = [f"{entry.name}.b{n}" for entry in entries for n in range(group.itemsize)]
    if [entry.name for entry in header.entries] != expected:
        raise PackCorrupt(path=path, what=f"its tensors are not those of {group.id} in {CODEC}")
    out = bytearray(nbytes)
    out[: len(lead)] = lead
    body = np.frombuffer(out, np.uint8)[len(lead) :]
    frames = _frames(header, data)
    for entry in entries:
        elements = body[entry.first : entry.stop].reshape(-1, group.itemsize)
        for number in range(group.itemsize):
            part = _decompressed(zstandard, next(frames), len(elements), path)
            elements[:, number] = np.frombuffer(part, np.uint8)
    del body
    if digest(memoryview(out)[len(lead) :]).hex() != rows:
        raise PackCorrupt(path=path, what="its rows are not those that were packed")
    return out


def _said(header: Header, path: str) -> tuple[LayerGroup, range, str]:
    """The group, positions and rows' digest that a blob says."""
    metadata: dict[str, Any] = header.metadata
    if set(metadata) != _FIELDS or metadata["codec"] != CODEC or not is_hex(metadata["rows"]):
        raise PackCorrupt(path=path, what=f"its metadata is none of {CODEC}")
    layers = set()
    for entry in header.entries:
        found = _TENSOR.fullmatch(entry.name)
        if found is None or entry.dtype != "U8":
            raise PackCorrupt(path=path, what=f"{entry.name[:80]} is no layer's bytes")
        layers.add(int(found[1]))
    facts = facts_of(metadata["group"])
    if facts is None or not layers or max(layers) >= LAYERS:
        raise PackCorrupt(path=path, what=f"{str(metadata['group'])[:80]!r} is no group")
    first, count = metadata["first"], metadata["count"]
    good = type(first) is int and type(count) is int and first >= 0 and count >= 1
    if not good or first // BLOCK != (first + count - 1) // BLOCK:
        raise PackCorrupt(path=path, what=f"{count!r} rows from {first!r} are not in one block")
    kind = FULL if facts.sliding_window is None else SLIDING
    group = LayerGroup(layers=tuple(sorted(layers)), kind=kind, **facts._asdict())
    return group, range(first, first + count), metadata["rows"]


def _frames(header: Header, data: bytearray | memoryview) -> Iterator[memoryview]:
    view = memoryview(data)[header.data_first :]
    for entry in header.entries:
        yield view[entry.first : entry.stop]


def _decompressed(zstandard: Any, frame: memoryview, nbytes: int, path: str) -> bytes:  # noqa: ANN401
    """One frame's bytes, as many as expected and nothing behind: PackCorrupt."""
    try:
        said = zstandard.get_frame_parameters(frame).content_size
        if said != nbytes:
            raise PackCorrupt(path=path, what=f"a frame of {said} bytes, {nbytes} are needed")
        worker = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        data: bytes = worker.decompress(frame)
    except zstandard.ZstdError as error:
        raise PackCorrupt(path=path, what=f"a frame is none: {error}") from error
    if len(data) != nbytes or not worker.eof or worker.unused_data:
        raise PackCorrupt(path=path, what="a frame ends elsewhere than its tensor")
    return data


def _itemsize(header: Header) -> int:
    entry = header.entries[0]
    count = 1
    for dim in entry.shape:
        count *= dim
    return (entry.stop - entry.first) // count


def _zstandard() -> Any:  # noqa: ANN401 - a module
    try:
        import zstandard  # noqa: PLC0415
    except ImportError as error:
        raise ExtraMissing(package="zstandard", extra="zstd") from error
    return zstandard
