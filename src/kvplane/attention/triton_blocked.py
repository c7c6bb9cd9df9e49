"""Attention on a GPU over blocks of absolute positions: the order of `blocked` in two launches.

    attend          the contract of `reference.attend`: rows in runs, the step's chunk beside them
    decode          one token a sequence: stores its row and attends in the same pass
    decode_batch    the same for sessions of different lengths, planes and cursors in device tables
    prefill         attends over the old window and the rounded chunk, then stores the chunk

Bits depend on a query's position, its window and the kind of call (one token, up to 64, more):
not on rotation, layout, growth, batch or neighbours. The arithmetic is in `triton_splits` (one
token, up to 64) and `triton_tiles` (more).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvplane.attention.triton_launch import NO_SEAM, Call, Cursor, Rule, run
from kvplane.attention.triton_table import TABLE
from kvplane.errors import ArgumentError
from kvplane.kernels.triton_rows import seam_of, store_runs
from kvplane.kernels.vectorized import RowPlane

__all__ = ["TABLE", "Cursor", "attend", "decode", "decode_batch", "prefill"]


def attend(
    plane: RowPlane,
    runs: Sequence[range],
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    first_key: int,
    first_query: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.attend`, in blocks of absolute positions.

    Raises:
        ArgumentError: a query has no key of its own position, rows in more runs than a ring has,
            a scale or softcap that is not above 0.
    """
    held = sum(len(run) for run in runs)
    stop = first_key + held + (0 if key is None else key.shape[1])
    if not first_key <= first_query or stop < first_query + query.shape[1]:
        raise ArgumentError(
            argument="first_query",
            expected=f"queries within [{first_key}, {stop})",
            got=(first_query, first_query + query.shape[1]),
        )
    if key is not None and first_key + held != first_query:
        raise ArgumentError(argument="first_query", expected=str(first_key + held), got=first_query)
    cursor = Cursor(
        first_query=first_query,
        first_key=first_key,
        origin_row=runs[0].start if runs else 0,
        seam=seam_of(runs) if runs else NO_SEAM,
    )
    rule = Rule(window=window, scale=scale, softcap=softcap, sinks=sinks)
    return run(plane, cursor, query, key, value, call=Call(rule=rule))


def decode(
    plane: RowPlane,
    cursor: Cursor | Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    physical: bool = False,
) -> Tensor:
    """Store one token's row and attend over it and the rows before: `[batch, 1, heads, dim]`.

    Args:
        plane: rows; the new one is written.
        cursor: before the token, numbers or a device table (see `triton_cursors`).
        query: [batch, 1, heads, head_dim].
        key: [batch, 1, kv_heads, head_dim] in the plane's dtype.
        value: [batch, 1, kv_heads, value_dim], likewise.
        window: keys the query sees, its own included; None: all.
        scale: factor on the scores.
        softcap: as in `attend`.
        sinks: as in `attend`.
        physical: sum rows in buffer order, as the chapter's engine does; for the contrast only.
    """
    rule = Rule(window=window, scale=scale, softcap=softcap, sinks=sinks)
    return run(
        plane, cursor, query, key, value, call=Call(rule=rule, stores=True, physical=physical)
    )


def decode_batch(
    planes: Sequence[RowPlane],
    cursors: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bases: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`decode` for sessions of different lengths, each with a plane of its own, in one launch.

    Args:
        planes: one a session, all with the same strides.
        cursors: int64 [sessions, 4] on the device, before the token.
        query: [sessions, 1, heads, head_dim].
        key: as in `decode`, [sessions, ...].
        value: likewise.
        bases: addresses of the planes, from `plane_bases`.
        window: as in `decode`.
        scale: as in `decode`.
        softcap: as in `decode`.
        sinks: as in `decode`.
    """
    rule = Rule(window=window, scale=scale, softcap=softcap, sinks=sinks)
    return run(
        planes[0], cursors, query, key, value, call=Call(rule=rule, stores=True, bases=bases)
    )


def prefill(
    plane: RowPlane,
    cursor: Cursor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    runs: Sequence[range],
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over the old rows and a chunk, then store the chunk's last rows into `runs`.

    Two launches on one stream: in one, a program could overwrite rows that another still reads.
    """
    rule = Rule(window=window, scale=scale, softcap=softcap, sinks=sinks)
    out = run(plane, cursor, query, key, value, call=Call(rule=rule))
    count = sum(len(run) for run in runs)
    store_runs(plane, runs, key[:, key.shape[1] - count :], value[:, value.shape[1] - count :])
    return out


def plane_bases(planes: Sequence[RowPlane]) -> Tensor:
    """Addresses of sessions' planes for `decode_batch`: int64 [sessions, 2] on their device.

    Raises:
        ArgumentError: planes of different strides or dtypes, or not aligned to 16 bytes.
    """
    kinds = {
        (plane.key.stride()[1:], plane.value.stride()[1:], plane.key.dtype) for plane in planes
    }
    addresses = [[plane.key.data_ptr(), plane.value.data_ptr()] for plane in planes]
    if len(kinds) != 1 or any(address & 15 for pair in addresses for address in pair):
        raise ArgumentError(argument="planes", expected="equal strides, 16 bytes", got=kinds)
    return torch.tensor(addresses, dtype=torch.int64, device=planes[0].key.device)
