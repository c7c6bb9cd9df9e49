"""A saved session as one tensor a layer, out of its blobs and into a root again.

For files that hold a whole session: rows in logical order, `[length, kv_heads, dim]`, whatever
blobs they lie in. A root that takes them in has blobs of its own, one a block.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, PackMismatch
from kvplane.ledger import Span
from kvplane.pack.blob import blob_name, check_rows, row_blob, state_blob, tensors_of
from kvplane.pack.content import put_content
from kvplane.pack.documents import SavedSession
from kvplane.pack.encoding import digest, hasher
from kvplane.pack.groups import groups_of
from kvplane.pack.header import header_of
from kvplane.pack.lease import Lease
from kvplane.pack.limits import BLOCK
from kvplane.pack.reader import read_blob, read_states
from kvplane.pack.sessions import check_session_name, session_file
from kvplane.pack.state import GroupRows
from kvplane.storage import Storage

Rows = Mapping[int, tuple[Tensor, Tensor]]
# the widest blob of rows: more is no blob of this format
BLOB_NBYTES = 1 << 32


class Whole(NamedTuple):
    """A session: what was said of it, its rows by layer, and the states of other layers."""

    saved: SavedSession
    rows: dict[int, tuple[Tensor, Tensor]]
    states: dict[str, Tensor]


def gathered(storage: Storage, saved: SavedSession) -> Whole:
    """A saved session's rows, every blob of them verified.

    Raises:
        PackMissing, PackCorrupt: a blob is not what was named.
    """
    needed_by = f"session {saved.name}"
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    with Lease(storage) as lease:
        for name, group in groups_of(saved).items():
            parts: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in group.layers}
            for span in saved.state.groups[name].spans:
                lease.keep()
                data = read_blob(storage, span.blob, limit=BLOB_NBYTES, needed_by=needed_by)
                path = f"{storage.location}/{blob_name(span.blob)}"
                header = header_of(data, path)
                first = check_rows(header, group, path).start
                tensors = dict(tensors_of(header, data))
                here = slice(span.first - first, span.stop - first)
                for layer in group.layers:
                    pair = (tensors[f"layers.{layer}.{which}"][here] for which in ("key", "value"))
                    key, value = (tensor.clone() for tensor in pair)
                    parts[layer].append((key, value))
            for layer, pieces in parts.items():
                keys, values = zip(*pieces, strict=True) if pieces else ((), ())
                shape = (0, group.num_kv_heads)
                dtype = getattr(torch, group.dtype)
                rows[layer] = (
                    torch.cat(keys) if keys else torch.empty(*shape, group.head_dim, dtype=dtype),
                    torch.cat(values)
                    if values
                    else torch.empty(*shape, group.value_head_dim, dtype=dtype),
                )
        states = read_states(storage, saved.state, needed_by)
    return Whole(saved, rows, states)


def put_whole(
    storage: Storage, whole: Whole, *, name: str | None = None, replace_it: bool = False
) -> SavedSession:
    """Save a whole session in a root.

    Args:
        storage: an opened root.
        whole: what to save; its spans are made anew.
        name: another than its own.
        replace_it: an older session of that name is replaced.

    Raises:
        ArgumentError: a name that cannot be one, or that a session has.
        PackMismatch: rows of another shape or dtype than the session's layers. Nothing was written.
        SessionLocked: another process writes a session of that name.
        StorageError: something could not be written; no session names what was.
    """
    name = check_session_name(whole.saved.name if name is None else name)
    file = session_file(name)
    _check_shapes(whole)
    with storage.lock(name), Lease(storage) as lease:
        if not replace_it and storage.exists(file):
            expected = "a name that no session has (--replace)"
            raise ArgumentError(argument="name", expected=expected, got=name)

        def put() -> SavedSession:
            groups = {}
            for group_id, group in groups_of(whole.saved).items():
                first, stop = whole.saved.state.groups[group_id].first, whole.saved.state.position
                edges = [first, *range((first // BLOCK + 1) * BLOCK, stop, BLOCK), stop]
                spans = []
                for begin, end in pairwise(edges):
                    if begin == end:
                        continue
                    lease.keep()
                    here = slice(begin - first, end - first)
                    pieces = {
                        layer: [(whole.rows[layer][0][here], whole.rows[layer][1][here])]
                        for layer in group.layers
                    }
                    blob = _put(storage, row_blob(group, begin, pieces))
                    spans.append(Span(begin, end, blob))
                groups[group_id] = GroupRows(first=first, spans=tuple(spans))
            states = None
            if whole.states:
                states = _put(storage, state_blob(whole.saved.state.position, whole.states))
            state = replace(whole.saved.state, groups=groups, states=states)
            return replace(whole.saved, name=name, state=state)

        saved = put()
        storage.replace(file, saved.encoded())
        # as every writer: what a sweeper took before it was named is put again
        put()
    return saved


def rows_digest(whole: Whole) -> str:
    """A digest of every row and state, in order of layer and name."""
    state = hasher()
    for layer in sorted(whole.rows):
        for tensor in whole.rows[layer]:
            state.update(_bytes(tensor))
    for name in sorted(whole.states):
        state.update(name.encode())
        state.update(_bytes(whole.states[name]))
    return state.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data.cast("B")


def _put(storage: Storage, data: bytearray | memoryview) -> str:
    blob = digest(data).hex()
    put_content(storage, blob_name(blob), data)
    return blob


def _check_shapes(whole: Whole) -> None:
    position = whole.saved.state.position
    for name, group in groups_of(whole.saved).items():
        count = position - whole.saved.state.groups[name].first
        dtype = getattr(torch, group.dtype)
        for layer in group.layers:
            if layer not in whole.rows:
                raise PackMismatch(field=f"layer {layer}", expected="rows", got=None)
            dims = (group.head_dim, group.value_head_dim)
            for tensor, dim in zip(whole.rows[layer], dims, strict=True):
                expected = ((count, group.num_kv_heads, dim), dtype)
                if (tuple(tensor.shape), tensor.dtype) != expected:
                    got = (tuple(tensor.shape), tensor.dtype)
                    raise PackMismatch(field=f"layer {layer}", expected=expected, got=got)
