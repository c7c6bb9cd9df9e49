"""What every session of a store has in common, decided once when the store is made."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, TensorMismatch
from kvplane.geometry import LayerGroup, ModelGeometry
from kvplane.kernels import rounding
from kvplane.plane import Layout, PlaneShape
from kvplane.ring import RingCursor
from kvplane.tokens import check_kind, whole

Attend = Callable[..., Tensor]
COUNT_STOP = 2**62
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """The facts of a store that its sessions and steps read.

    Args:
        geometry: the model's.
        dtype: of the planes.
        device: of the planes.
        max_context: positions end below it.
        capacities: rows of each group's planes.
        layouts: by layer kind.
        attend: the attention function of the chosen order.
    """

    geometry: ModelGeometry
    dtype: torch.dtype
    device: torch.device
    max_context: int
    capacities: Mapping[str, int]
    layouts: Mapping[str, Layout]
    attend: Attend
    group_ids: Mapping[int, str] = field(init=False)
    shared_layers: frozenset[int] = field(init=False)
    full_row_nbytes: int = field(init=False)
    ring_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        groups = self.geometry.groups
        put = object.__setattr__
        put(self, "group_ids", {layer: group.id for group in groups for layer in group.layers})
        shared = {layer.shares_kv_with for layer in self.geometry.layers}
        put(self, "shared_layers", frozenset(owner for owner in shared if owner is not None))
        put(
            self,
            "full_row_nbytes",
            sum(self.row_nbytes(group) for group in groups if group.sliding_window is None),
        )
        put(
            self,
            "ring_nbytes",
            sum(
                self.row_nbytes(group) * self.capacities[group.id]
                for group in groups
                if group.sliding_window is not None
            ),
        )

    def row_nbytes(self, group: LayerGroup) -> int:
        """Bytes of one row in all of the group's layers, of one sequence."""
        width = group.num_kv_heads * (group.head_dim + group.value_head_dim)
        return len(group.layers) * width * self.dtype.itemsize

    def shape(self, group: LayerGroup, batch: int) -> PlaneShape:
        """The shape of one of the group's planes."""
        return PlaneShape(
            batch=batch,
            capacity=self.capacities[group.id],
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            value_head_dim=group.value_head_dim,
            dtype=self.dtype,
            layout=self.layouts[group.kind],
        )

    def cursors(self, first_position: int, first_row: int | None) -> dict[str, RingCursor]:
        """Empty cursors; `first_row` sets the rings' rotation, None takes the sequential one."""
        cursors = {}
        for group in self.geometry.groups:
            capacity = self.capacities[group.id]
            row = divmod(first_position, capacity)[1]
            if first_row is not None and group.sliding_window is not None:
                row = first_row
            cursors[group.id] = RingCursor(
                capacity,
                origin_logical=first_position,
                origin_physical=row,
                max_context=self.max_context,
            )
        return cursors

    def rounded(
        self, layer: int, rows: tuple[Tensor, Tensor], *, batch: int | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """Key and value of a step, shaped as given, in the planes' dtype.

        Raises:
            TensorMismatch: shape, dtype, device or layout.
        """
        group = self.geometry.group_of(layer)
        lead = (count, group.num_kv_heads) if batch is None else (batch, count, group.num_kv_heads)
        key = self._rounded(layer, "key", rows[0], (*lead, group.head_dim))
        value = self._rounded(layer, "value", rows[1], (*lead, group.value_head_dim))
        return key, value

    def _rounded(self, layer: int, what: str, rows: Tensor, shape: Sequence[int]) -> Tensor:
        if (
            type(rows) is Tensor
            and rows.dtype is self.dtype
            and rows.shape == shape
            and rows.device == self.device
            and rows.layout is torch.strided
            and not rows.requires_grad
        ):
            # what a model on its way hands over, a layer at a time
            return rows
        self._check(layer, what, rows, shape)
        if rows.dtype is self.dtype:
            return rows.detach() if rows.requires_grad else rows
        if rows.dtype is not torch.float32:
            raise TensorMismatch(
                layer=layer,
                what=f"{what} dtype",
                expected=f"{self.dtype} or torch.float32",
                got=rows.dtype,
            )
        # to nearest even, infinities included, as the chapter's store kernel does
        return rounding.rounded(rows.detach(), self.dtype)

    def query(self, layer: int, query: Tensor, *, batch: int | None, count: int) -> Tensor:
        """The queries of a step as `[batch, tokens, head, dim]`.

        Raises:
            TensorMismatch: shape, dtype or device.
        """
        group = self.geometry.group_of(self.geometry.owner(layer))
        heads = _num_heads(query)
        if heads < 1 or heads % group.num_kv_heads:
            raise TensorMismatch(
                layer=layer,
                what="query heads",
                expected=f"a multiple of {group.num_kv_heads}",
                got=heads,
            )
        shape = (count, heads, group.head_dim)
        self._check(layer, "query", query, shape if batch is None else (batch, *shape))
        if not query.is_floating_point():
            raise TensorMismatch(
                layer=layer, what="query dtype", expected="a float dtype", got=query.dtype
            )
        return query.detach() if batch is not None else query.detach()[None]

    def rule(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """The sinks of a step, once nothing can be wrong with how it attends.

        Raises:
            ArgumentError: a scale that is no finite number, a softcap that is not above 0.
            TensorMismatch: sinks that are not one a head, of a float dtype, on the device.
        """
        if scale is not None and not _is_finite(scale):
            raise ArgumentError(argument="scale", expected="a finite number, or None", got=scale)
        if softcap is not None and not (_is_finite(softcap) and softcap > 0):
            raise ArgumentError(argument="softcap", expected="above 0, or None", got=softcap)
        if sinks is None:
            return None
        self._check(layer, "sinks", sinks, query.shape[2:3])
        if not sinks.is_floating_point():
            raise TensorMismatch(
                layer=layer, what="sinks dtype", expected="a float dtype", got=sinks.dtype
            )
        return sinks.detach()

    def _check(self, layer: int, what: str, tensor: object, shape: Sequence[int]) -> None:
        if not isinstance(tensor, Tensor):
            raise TensorMismatch(
                layer=layer, what=what, expected="a tensor", got=type(tensor).__name__
            )
        if tensor.shape != shape:
            raise TensorMismatch(
                layer=layer, what=f"{what} shape", expected=tuple(shape), got=tuple(tensor.shape)
            )
        if tensor.device != self.device:
            raise TensorMismatch(
                layer=layer, what=f"{what} device", expected=self.device, got=tensor.device
            )
        if tensor.layout is not torch.strided:
            raise TensorMismatch(
                layer=layer, what=f"{what} layout", expected=torch.strided, got=tensor.layout
            )


def checked_layouts(layout: Mapping[str, Layout] | None, device: torch.device) -> dict[str, Layout]:
    """The layout of each layer kind; the chapter's pairing unless said otherwise.

    A ring is token-major, so that a rotation moves whole tokens; a full plane is head-major, so
    that each head's history is one linear span (the chapter's section 15.3). On a GPU both are
    read equally fast (`docs/benchmarks/gpu.md`) and pages are large: token-major planes grow and
    are shared in fewer of them.

    Raises:
        ArgumentError: a key is no layer kind, or a value no layout.
    """
    layouts = {
        "sliding_attention": Layout.TOKEN_MAJOR,
        "full_attention": Layout.TOKEN_MAJOR if device.type == "cuda" else Layout.HEAD_MAJOR,
    }
    if layout is not None:
        check_kind("layout", layout, Mapping, f"{sorted(layouts)} to a Layout")
    for kind, wanted in (layout or {}).items():
        if kind not in layouts or not isinstance(wanted, Layout):
            raise ArgumentError(
                argument="layout", expected=f"{sorted(layouts)} to a Layout", got={kind: wanted}
            )
        layouts[kind] = wanted
    return layouts


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def checked_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype that planes can have: ArgumentError."""
    wanted = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype) or wanted not in DTYPES.values():
        raise ArgumentError(argument="dtype", expected=str(sorted(DTYPES)), got=dtype)
    return wanted


def checked_device(device: torch.device | str) -> torch.device:
    """The device with its number, as tensors on it say: ArgumentError."""
    try:
        where = torch.device(device)
        return torch.zeros(0, device=where).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise ArgumentError(
            argument="device", expected="one that works here", got=device
        ) from error


def check_count(argument: str, count: object, least: int) -> int:
    """The count as an int, unless it is no whole number, or too small, or huge: ArgumentError."""
    number = whole(count)
    if number is None or not least <= number < COUNT_STOP:
        expected = f"a whole number within [{least}, 2^62)"
        raise ArgumentError(argument=argument, expected=expected, got=count)
    return number


def _is_finite(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        return False
    try:
        # what the float32 of the sums can hold
        return abs(float(number)) <= FLOAT32_MAX
    except OverflowError:
        return False


def _num_heads(query: object) -> int:
    return query.shape[-2] if isinstance(query, Tensor) and query.ndim > 1 else 0
