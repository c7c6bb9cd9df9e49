"""What a store of a given geometry takes, as arithmetic; no tensors.

    reserved     rows the planes could hold
    rows held    rows that are live
    pages held   pages of memory behind every row that was ever written
    scratch      beside the planes, while a step is open

The rules that a plan and a store share live here: the capacity of a plane, the rows of a journal.
A session of a plan was born at position 0.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any, NamedTuple

from kvplane.errors import ArgumentError
from kvplane.geometry import LayerGroup, ModelGeometry

COUNT_STOP = 2**62
TOKEN_MAJOR = "NHD"  # noqa: S105 - no password
HEAD_MAJOR = "HND"
LAYOUT = {"sliding_attention": TOKEN_MAJOR, "full_attention": HEAD_MAJOR}


def capacity_of(
    group: LayerGroup,
    *,
    max_context: int,
    slack: int = 0,
    row_floor: int = 1,
    page_nbytes: int = 1,
) -> int:
    """Rows of each of the group's planes.

    A full plane has one for every position, a ring its window and slack, neither more than
    max_context nor fewer than the kernel's floor. A ring is rounded up to whole pages, so that it
    can be unrolled, when that costs less than an eighth.

    Args:
        group: whose planes.
        max_context: positions end below it.
        slack: rows of a ring beyond its window.
        row_floor: fewest rows the kernel in use takes.
        page_nbytes: of the memory that unrolls rings; 1 where none does.
    """
    if group.sliding_window is None:
        return max(row_floor, max_context)
    rows = max(row_floor, min(max_context, group.sliding_window + slack))
    page_rows = page_nbytes // gcd(page_nbytes, group.row_nbytes)
    surplus = -rows % page_rows
    return rows + surplus if 8 * surplus < rows else rows


def journal_nbytes(
    group: LayerGroup,
    num_tokens: int,
    *,
    capacity: int,
    speculative: bool = False,
    first: int | None = None,
) -> int:
    """Bytes that a step of `num_tokens` keeps beside the group's planes until it is committed.

    Of the rows that it overwrites, those that its session still needs should it not be kept,
    [first - (window - 1), first); and, when fewer tokens than all may be accepted, the head of a
    step that is longer than the ring, which is never stored.

    Args:
        group: whose planes.
        num_tokens: of the step.
        capacity: rows of a plane.
        speculative: whether fewer tokens may be accepted.
        first: the step's first position; None for any on a ring that has filled.
    """
    if group.sliding_window is None:
        return 0
    if first is None:
        first = capacity + group.sliding_window
    overwritten_stop = min(first, first + num_tokens - capacity)
    needed_first = max(0, first - (group.sliding_window - 1))
    rows = max(0, overwritten_stop - needed_first)
    if speculative:
        rows += max(0, num_tokens - capacity)
    return len(group.layers) * group.row_nbytes * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes of a layer group, or of several together.

    Args:
        reserved: of all rows the planes could hold.
        rows_held: of the live rows.
        pages_held: of the pages behind every row that was written.
        journal: of rows kept until a step is committed.
        capture: of sliding rows kept at cuts inside a step.
        gather: of the window and the step in one tensor, a layer at a time.
        waiting: of a chunk's rows that wait until its queries have read the old window: of one
            layer, and of those whose rows other layers read; the step's own, not the store's.
    """

    reserved: int = 0
    rows_held: int = 0
    pages_held: int = 0
    journal: int = 0
    capture: int = 0
    gather: int = 0
    waiting: int = 0

    @property
    def scratch(self) -> int:
        """What the store keeps beside the planes while a step is open."""
        return self.journal + self.capture + self.gather

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            reserved=self.reserved + other.reserved,
            rows_held=self.rows_held + other.rows_held,
            pages_held=self.pages_held + other.pages_held,
            journal=self.journal + other.journal,
            capture=self.capture + other.capture,
            # one layer's at a time, whichever group it is of
            gather=max(self.gather, other.gather),
            waiting=self.waiting + other.waiting,
        )

    def __mul__(self, count: int) -> "Bytes":
        return Bytes(**{name: count * value for name, value in asdict(self).items()})

    def to_dict(self) -> dict[str, int]:
        """JSON types."""
        return {**asdict(self), "scratch": self.scratch}


class GroupPlan(NamedTuple):
    """One layer group of one session: the group, rows of each plane, bytes of all its layers.

    Its planes lie in `layout`, in memory that is given `page_nbytes` at a time.
    """

    group: LayerGroup
    capacity: int
    nbytes: Bytes
    layout: str = TOKEN_MAJOR
    page_nbytes: int = 1

    def pages_of(self, first: int, stop: int) -> int:
        """Bytes of the pages behind positions [first, stop) in all of the group's layers."""
        return len(self.group.layers) * _pages_of(
            self.group,
            _runs_of(first, stop, self.capacity),
            capacity=self.capacity,
            layout=self.layout,
            nbytes=self.page_nbytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The plan of a store whose sessions have each taken `context` tokens.

    Args:
        geometry: the model's.
        context: tokens of each session.
        max_context: what full planes are reserved for.
        sessions: how many there are.
        groups: one session's layer groups.
    """

    geometry: ModelGeometry
    context: int
    max_context: int
    sessions: int
    groups: tuple[GroupPlan, ...]

    @property
    def session(self) -> Bytes:
        """One session."""
        return sum((plan.nbytes for plan in self.groups), Bytes())

    @property
    def total(self) -> Bytes:
        """All sessions."""
        return self.session * self.sessions

    def kind(self, kind: str) -> Bytes:
        """One session's layers of a kind: "sliding_attention" or "full_attention"."""
        return sum((plan.nbytes for plan in self.groups if plan.group.kind == kind), Bytes())

    def forks_held(self, num_forks: int, *, shares_pages: bool, written: int = 0) -> int:
        """Bytes of pages that a session and its forks hold together.

        Args:
            num_forks: beside the session itself.
            shares_pages: whether the memory shares pages until one side writes (mapped), or copies
                every row (heap).
            written: tokens that each fork has taken since.

        Raises:
            ArgumentError: a number is negative, or the tokens do not fit max_context.
        """
        _whole("forks", num_forks, 0)
        stop = self.context + _whole("written", written, 0)
        if stop > self.max_context:
            expected = f"at most {self.max_context - self.context}"
            raise ArgumentError(argument="written", expected=expected, got=written)
        # a page that a fork writes to, new or shared until then, is its own
        first = self.context if shares_pages else 0
        own = sum(plan.pages_of(first, stop) for plan in self.groups)
        return self.session.pages_held + num_forks * own

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "context": self.context,
            "max_context": self.max_context,
            "sessions": self.sessions,
            "groups": {
                plan.group.id: {
                    "kind": plan.group.kind,
                    "layers": list(plan.group.layers),
                    "capacity": plan.capacity,
                    **plan.nbytes.to_dict(),
                }
                for plan in self.groups
            },
            "session": self.session.to_dict(),
            "total": self.total.to_dict(),
        }


def footprint(
    geometry: ModelGeometry,
    *,
    context: int,
    sessions: int = 1,
    slack: int = 0,
    step: int = 1,
    speculative: bool = False,
    page_nbytes: int = 1,
    ring_page_nbytes: int | None = None,
    max_context: int | None = None,
    row_floor: int = 1,
    layout: Mapping[str, str] | None = None,
    cuts: int = 0,
    gather: bool = False,
) -> Footprint:
    """Bytes of a store, by layer group: reserved, rows held, pages held, scratch.

    Scratch is the most that any step of a session's way to `context` takes.

    Args:
        geometry: the model's.
        context: tokens that each session has taken.
        sessions: how many there are.
        slack: rows of a ring beyond its window.
        step: tokens of a step.
        speculative: whether fewer of them may be accepted.
        page_nbytes: what the memory gives at a time; 1 counts rows.
        ring_page_nbytes: pages that rings must fill to be unrolled; None: page_nbytes; 1 where
            memory never unrolls them.
        max_context: positions end below it; None: context.
        row_floor: fewest rows of a plane that the kernel in use takes.
        layout: by layer kind, "NHD" or "HND"; the store's default where not given.
        cuts: inside a step, at which sliding rows are captured for packs.
        gather: whether a stock kernel wants a chunk's window and its own rows as one tensor.

    Raises:
        ArgumentError: a number that means nothing.
    """
    max_context = max(1, _whole("context", context, 0)) if max_context is None else max_context
    if _whole("max_context", max_context, 1) < context:
        raise ArgumentError(argument="context", expected=f"at most {max_context}", got=context)
    _whole("sessions", sessions, 1)
    _whole("slack", slack, 0)
    _whole("row_floor", row_floor, 1)
    _whole("cuts", cuts, 0)
    step = min(_whole("step", step, 1), context)
    pages = _whole("page_nbytes", page_nbytes, 1)
    ring_pages = pages if ring_page_nbytes is None else ring_page_nbytes
    _whole("ring_page_nbytes", ring_pages, 1)
    layouts = {**LAYOUT, **(layout or {})}
    if set(layouts) != set(LAYOUT) or not set(layouts.values()) <= {TOKEN_MAJOR, HEAD_MAJOR}:
        expected = f"{sorted(LAYOUT)} to {HEAD_MAJOR!r} or {TOKEN_MAJOR!r}"
        raise ArgumentError(argument="layout", expected=expected, got=layout)
    owners = {layer.shares_kv_with for layer in geometry.layers}
    plans = []
    for group in geometry.groups:
        capacity = capacity_of(
            group,
            max_context=max_context,
            slack=slack,
            row_floor=row_floor,
            page_nbytes=ring_pages,
        )
        rows = min(context, capacity)
        layer_nbytes = group.row_nbytes * len(group.layers)
        # a cut lies inside a step, before its last token
        seen = 0 if group.sliding_window is None else min(context - 1, group.sliding_window - 1)
        read_by_others = len(owners.intersection(group.layers))
        journal = journal_nbytes(
            group, step, capacity=capacity, speculative=speculative, first=context - step
        )
        waits = bool(journal) or step > capacity
        nbytes = Bytes(
            reserved=layer_nbytes * capacity,
            rows_held=layer_nbytes * rows,
            pages_held=len(group.layers)
            * _pages_of(
                group,
                _runs_of(0, context, capacity),
                capacity=capacity,
                layout=layouts[group.kind],
                nbytes=pages,
            ),
            # nothing shrinks with a later step: the last one takes the most
            journal=journal,
            capture=min(cuts, max(step - 1, 0)) * layer_nbytes * seen,
            gather=_gather_rows(group, context, step) * group.row_nbytes if gather else 0,
            waiting=step * group.row_nbytes * min(read_by_others + 1, len(group.layers))
            if waits
            else 0,
        )
        plans.append(GroupPlan(group, capacity, nbytes, layouts[group.kind], pages))
    return Footprint(
        geometry=geometry,
        context=context,
        max_context=max_context,
        sessions=sessions,
        groups=tuple(plans),
    )


def _whole(argument: str, number: object, least: int) -> int:
    if type(number) is not int or not least <= number < COUNT_STOP:
        expected = f"a whole number within [{least}, 2^62)"
        raise ArgumentError(argument=argument, expected=expected, got=number)
    return number


def _gather_rows(group: LayerGroup, context: int, step: int) -> int:
    """Rows of one layer's window and step in one tensor; a full plane is one span already."""
    if group.sliding_window is None:
        return 0
    return min(context - step, group.sliding_window - 1) + step


def _runs_of(first: int, stop: int, capacity: int) -> list[range]:
    """The rows that positions [first, stop) take, of a session born at position 0."""
    if stop - first >= capacity:
        return [range(capacity)]
    row = divmod(first, capacity)[1]
    seam = min(capacity, row + stop - first)
    return [range(row, seam), range(row + stop - first - seam)]


def _pages_of(
    group: LayerGroup, runs: list[range], *, capacity: int, layout: str, nbytes: int
) -> int:
    """Bytes of the pages behind rows of a plane that begins on a page."""
    pieces = [(0, group.row_nbytes)]
    if layout == HEAD_MAJOR:
        # keys of every head, then values of every head, each with all its rows
        halves = ((0, group.head_dim), (group.head_dim, group.value_head_dim))
        pieces = [
            ((before * group.num_kv_heads + head * dim) * capacity, dim)
            for before, dim in halves
            for head in range(group.num_kv_heads)
        ]
        pieces = [(base * group.itemsize, dim * group.itemsize) for base, dim in pieces]
    pages = sorted(
        ((base + run.start * size) // nbytes, -(-(base + run.stop * size) // nbytes))
        for run in runs
        if run
        for base, size in pieces
    )
    count = stop = 0
    for first, last in pages:
        # pieces that lie close share a page
        count += max(0, last - max(first, stop))
        stop = max(stop, last)
    return count * nbytes
