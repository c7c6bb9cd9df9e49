"""Rows between a GPU's planes and the host's memory, in pieces, copying and moving at once.

    out    plane ─ gathered ─► piece ══ side stream ══► pinned memory, one tensor a plane
    in     memory ══► piece, by way of a pinned buffer unless it is pinned ─ scattered ─► plane

Pieces alternate between two streams of their own: while one crosses the bus the next is gathered.
Both wait for what was queued before. `taken_out` returns when everything is there; `put_in` has the
current stream wait and returns at once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle

import torch
from torch import Tensor

from kvplane.kernels.checks import RowPlane

PIECE_NBYTES = 16 << 20

Runs = Sequence[range]
Store = Callable[[RowPlane, Runs, Tensor, Tensor], None]


def taken_out(planes: Sequence[tuple[RowPlane, Runs]]) -> list[tuple[Tensor, Tensor]]:
    """Key and value of rows of each plane, `[batch, rows, kv_head, dim]`, in pinned memory.

    Args:
        planes: of one GPU, each with the rows that are wanted.
    """
    if not planes:
        return []
    streams = _streams(planes[0][0].key.device)
    _follow(streams)
    turns = cycle(streams)
    taken = [
        (_out(plane.key, runs, turns), _out(plane.value, runs, turns)) for plane, runs in planes
    ]
    for stream in streams:
        stream.synchronize()
    return taken


def _out(source: Tensor, runs: Runs, turns: Iterator[torch.cuda.Stream]) -> Tensor:
    batch, _, heads, dim = source.shape
    count = sum(map(len, runs))
    target = torch.empty((batch, count, heads, dim), dtype=source.dtype, pin_memory=True)
    for sequence in range(batch):
        first = 0
        for run in runs:
            for piece in _pieces(run, heads * dim * source.element_size()):
                with torch.cuda.stream(next(turns)):
                    rows = source[sequence, piece.start : piece.stop].contiguous()
                    target[sequence, first : first + len(piece)].copy_(rows, non_blocking=True)
                first += len(piece)
    return target


def put_in(plane: RowPlane, runs: Runs, key: Tensor, value: Tensor, *, store: Store) -> None:
    """Copy rows from the host's memory, `[batch, rows, kv_head, dim]`, into rows of a plane.

    Args:
        plane: on a GPU.
        runs: the rows, in order.
        key: of the plane's dtype, pinned or not; may change once this returns, unless pinned.
        value: likewise.
        store: what copies rows that are on the device.
    """
    streams = _streams(plane.key.device)
    _follow(streams)
    row_nbytes = max(part[:, :1].nbytes for part in (key, value)) if key.shape[1] else 1
    turns = cycle(range(len(streams)))
    first = 0
    for run in runs:
        for piece in _pieces(run, row_nbytes):
            number = next(turns)
            with torch.cuda.stream(streams[number]):
                part = slice(first, first + len(piece))
                rows = [
                    _sent(each[:, part], plane.key.device, number, which)
                    for which, each in enumerate((key, value))
                ]
                store(plane, [piece], rows[0], rows[1])
            first += len(piece)
    current = torch.cuda.current_stream(plane.key.device)
    for stream in streams:
        current.wait_stream(stream)


def _sent(rows: Tensor, device: torch.device, number: int, which: int) -> Tensor:
    """Rows on the device, queued on the current stream."""
    if rows.is_pinned() and rows.is_contiguous():
        return rows.to(device, non_blocking=True)
    buffer, event = _buffer(device, number, which)
    # what the buffer held before has left it
    event.synchronize()
    if rows.nbytes > buffer.nbytes:
        return rows.to(device)
    held = buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
    held.copy_(rows)
    sent = held.to(device, non_blocking=True)
    event.record()
    return sent


def _pieces(run: range, row_nbytes: int) -> Iterator[range]:
    count = max(1, PIECE_NBYTES // row_nbytes)
    for first in range(run.start, run.stop, count):
        yield range(first, min(run.stop, first + count))


def _follow(streams: Sequence[torch.cuda.Stream]) -> None:
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]


@cache
def _buffer(device: torch.device, number: int, which: int) -> tuple[Tensor, torch.cuda.Event]:
    """A pinned buffer of one stream, for keys or for values, and when it was last read."""
    del device, number, which
    buffer = torch.empty(PIECE_NBYTES, dtype=torch.uint8, pin_memory=True)
    return buffer, torch.cuda.Event()  # type: ignore[no-untyped-call]
