"""Planes at any rotation, filled from one history, for tests that run on a GPU or interpreted."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvplane.plane import Layout
from kvplane.ring import RingCursor


@dataclass(frozen=True)
class Shape:
    device: str
    window: int
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    positions: tuple[int, ...]
    rotations: tuple[int, ...]
    chunk: int
    dtype: torch.dtype = torch.float16
    batch: int = 1

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def but(self, **changes: object) -> "Shape":
        return replace(self, **changes)


REAL = Shape(
    device="cuda",
    window=2048,
    kv_heads=2,
    group=16,
    head_dim=128,
    value_dim=128,
    positions=(0, 1, 31, 32, 33, 2047, 2048, 2049, 2559, 2560, 2561, 4097),
    rotations=(0, 1, 31, 32, 777, 2047),
    chunk=512,
)
SMALL = Shape(
    device="cpu",
    window=160,
    kv_heads=2,
    group=2,
    head_dim=16,
    value_dim=16,
    positions=(0, 33, 160, 321),
    rotations=(1, 33, 159),
    chunk=70,
)


@dataclass
class Rows:
    """A plane without memory management: what kernels ask for."""

    key: Tensor
    value: Tensor


def history(shape: Shape, count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of positions [0, count): the same numbers on every device.

    Queries have the planes' values in float32, so that outputs are float32 too: rounded to 16 bits
    they would hide most differences.
    """
    random = torch.Generator().manual_seed(seed)
    outs = []
    for heads, dim in (
        (shape.heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.value_dim),
    ):
        rows = torch.randn(shape.batch, count, heads, dim, generator=random)
        outs.append(rows.to(shape.dtype).to(shape.device))
    outs[0] = outs[0].float()
    return outs[0], outs[1], outs[2]


def poisoned(shape: Shape, capacity: int, layout: Layout) -> Rows:
    """Rows that are NaN until something writes them."""
    tensors = []
    for dim in (shape.head_dim, shape.value_dim):
        if layout is Layout.TOKEN_MAJOR:
            sizes = (capacity, shape.batch, shape.kv_heads, dim)
            tensors.append(_nan(shape, sizes).transpose(0, 1))
        else:
            sizes = (shape.batch, shape.kv_heads, capacity, dim)
            tensors.append(_nan(shape, sizes).transpose(1, 2))
    return Rows(*tensors)


def _nan(shape: Shape, sizes: tuple[int, ...]) -> Tensor:
    return torch.full(sizes, float("nan"), dtype=shape.dtype, device=shape.device)


def placed(
    shape: Shape,
    rows: tuple[Tensor, Tensor],
    position: int,
    *,
    capacity: int,
    rotation: int | None = None,
    layout: Layout = Layout.TOKEN_MAJOR,
) -> tuple[Rows, RingCursor]:
    """A plane that holds the last positions before `position`, and its cursor.

    `rotation` is the row of the oldest; None is where sequential appends put it.
    """
    key, value = rows
    plane = poisoned(shape, capacity, layout)
    oldest = max(0, position - capacity)
    row = divmod(oldest, capacity)[1] if rotation is None else rotation
    cursor = RingCursor(capacity, origin_logical=oldest, origin_physical=row)
    if position > oldest:
        cursor.append_batch(oldest, position - oldest)
        first = oldest
        for run in cursor.rows_of(oldest, position):
            plane.key[:, run.start : run.stop] = key[:, first : first + len(run)]
            plane.value[:, run.start : run.stop] = value[:, first : first + len(run)]
            first += len(run)
    return plane, cursor


def exact(
    shape: Shape,
    rows: tuple[Tensor, ...],
    first: int,
    stop: int,
    *,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of positions [first, stop) over a history, in float64, with masks."""
    begin = 0 if window is None else max(0, first - (window - 1))
    query = rows[0][:, first:stop].double().transpose(1, 2).unflatten(1, (-1, shape.group))
    key, value = (part[:, begin:stop].double().transpose(1, 2)[:, :, None] for part in rows[1:])
    scores = query @ key.transpose(-1, -2) * shape.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(begin, stop, device=key.device)
    queries = torch.arange(first, stop, device=key.device)[:, None]
    seen = at <= queries if window is None else (at <= queries) & (at > queries - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = sinks.double().to(key.device).reshape(1, -1, shape.group, 1, 1)
        scores = torch.cat([scores, logits.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : stop - begin]
    return (weights @ value).flatten(1, 2).transpose(1, 2)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal byte for byte, NaN included."""
    return torch.equal(
        first.contiguous().view(torch.uint8).cpu(), second.contiguous().view(torch.uint8).cpu()
    )


def error_of(out: Tensor, reference: Tensor) -> float:
    """Relative error in the Euclidean norm; NaN when any number is."""
    distance = (out.double().cpu() - reference.double().cpu()).norm()
    return float(distance / reference.double().norm())
