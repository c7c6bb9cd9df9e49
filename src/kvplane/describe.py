"""What a store does and why, and what it holds: plain data for people and for packs."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvplane.plane import Layout, PlaneShape

if TYPE_CHECKING:
    from kvplane.session import Session
    from kvplane.snapshot import Capture
    from kvplane.store import KVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A store's configuration in JSON types: no state, no address, no date.

    Two stores of equal configuration give equal descriptions, and a receiver whose `numerics` are
    equal goes on bit for bit.
    """

    geometry: dict[str, Any]
    dtype: str
    device: str
    max_context: int
    memory: dict[str, Any]
    layout: dict[str, str]
    attention: str
    kernels: dict[str, str]
    slack: int
    row_floor: int
    capacities: dict[str, int]
    numerics: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The same as nested dicts."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one layer group in one session, or a sum of such.

    Args:
        reserved: of all rows the planes could hold.
        rows_held: of the live rows.
        pages_held: of the pages behind every row that was ever written.
        shared: of pages that another session or checkpoint holds too.
        scratch: of the open step's journal.
    """

    reserved: int = 0
    rows_held: int = 0
    pages_held: int = 0
    shared: int = 0
    scratch: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(
            reserved=self.reserved + other.reserved,
            rows_held=self.rows_held + other.rows_held,
            pages_held=self.pages_held + other.pages_held,
            shared=self.shared + other.shared,
            scratch=self.scratch + other.scratch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a store holds, in bytes.

    Args:
        sessions: for each open session, by layer group id.
        checkpoints: of rows that live checkpoints copied.
        recorded: of overwritten rows that recording sessions keep.
        captures: of rows kept at cuts until packs take them.
        pages_held: of all pages, each counted once, whoever shares it.
        page_nbytes: the memory's page.
        limit: the store's; None for none.
    """

    sessions: tuple[dict[str, Held], ...]
    checkpoints: int
    recorded: int
    captures: int
    pages_held: int
    page_nbytes: int
    limit: int | None

    @property
    def total(self) -> Held:
        """All sessions and groups."""
        held = Held()
        for groups in self.sessions:
            for part in groups.values():
                held += part
        return held


def describe(store: "KVStore") -> Description:
    """The description of a store."""
    plan = store.plan
    return Description(
        geometry=plan.geometry.to_dict(),
        dtype=str(plan.dtype).removeprefix("torch."),
        device=plan.device.type,
        max_context=plan.max_context,
        memory={
            "backend": store.memory_choice.backend.name,
            "why": store.memory_choice.why,
            "page_nbytes": store.memory_choice.backend.page_nbytes,
            "fork": store.memory_choice.backend.fork,
            "unrolled": sorted(
                group.id
                for group in plan.geometry.groups
                if group.sliding_window is not None
                and plan.layouts[group.kind] is Layout.TOKEN_MAJOR
                and plan.capacities[group.id]
                * group.row_nbytes
                % store.memory_choice.backend.ring_page_nbytes
                == 0
                and store.memory_choice.backend.ring_page_nbytes > 1
            ),
        },
        layout={kind: layout.value for kind, layout in plan.layouts.items()},
        attention=store.attention,
        kernels=_kernels(store),
        slack=store.slack,
        row_floor=store.row_floor,
        capacities=dict(plan.capacities),
        numerics=dict(store.numerics),
    )


def _kernels(store: "KVStore") -> dict[str, str]:
    """What stores rows and what attends; the table of sizes is in the numerics."""
    if store.plan.device.type == "cuda" and store.plan.attend.__module__.endswith("triton_blocked"):
        return {"store": "Triton, one launch", "attention": f"{store.attention}, Triton"}
    return {"store": "vectorized", "attention": f"{store.attention}, PyTorch"}


def report(store: "KVStore") -> MemoryReport:
    """What a store holds now."""
    page_nbytes = store.memory_choice.backend.page_nbytes
    sessions = store.sessions
    held = tuple(_held(session, page_nbytes) for session in sessions)
    arenas = [session.arena.held() for session in sessions]
    pages = dict(arena for arena in arenas if arena is not None)
    by_session = sum(
        part.pages_held
        for groups, arena in zip(held, arenas, strict=True)
        if arena is None
        for part in groups.values()
    )
    return MemoryReport(
        sessions=held,
        checkpoints=sum(kept.nbytes for session in sessions for kept in session.checkpoints),
        recorded=sum(s.undo.nbytes for s in sessions if s.undo is not None),
        captures=_captured(sessions),
        pages_held=by_session + sum(pages.values()),
        page_nbytes=page_nbytes,
        limit=store.account.limit,
    )


def _captured(sessions: "list[Session]") -> int:
    """Bytes of the captures of sessions and their checkpoints, each counted once."""
    captures: list[Capture] = []
    for session in sessions:
        # copies: other threads may use the sessions meanwhile
        captures += list(session.captures.values())
        for kept in list(session.checkpoints):
            captures += kept.captures.values()
    distinct = {id(capture): capture for capture in captures}.values()
    return sum(key.nbytes + value.nbytes for kept in distinct for key, value in kept.rows.values())


def _held(session: "Session", page_nbytes: int) -> dict[str, Held]:
    plan = session.plan
    result = {}
    for group in session.groups:
        shape = plan.shape(group, session.num_sequences)
        row_nbytes = plan.row_nbytes(group) * session.num_sequences
        step = session.open_step
        pages = shared = 0
        for layer in group.layers:
            counts = session.planes[layer].span.counts()
            if counts is None:
                counts = pages_of(shape, session.touched[group.id].runs, page_nbytes), 0
            pages += counts[0]
            shared += counts[1]
        result[group.id] = Held(
            reserved=len(group.layers) * shape.nbytes,
            rows_held=session.cursors[group.id].length * row_nbytes,
            pages_held=pages,
            shared=shared,
            scratch=0 if step is None else step.journal_rows(group.id) * row_nbytes,
        )
    return result


def pages_of(shape: PlaneShape, runs: "list[range]", page_nbytes: int) -> int:
    """Bytes of the pages behind rows of one plane whose memory begins on a page."""
    pages = sorted(
        (part.start // page_nbytes, -(-part.stop // page_nbytes))
        for run in runs
        for part in shape.byte_ranges(run)
    )
    count = stop = 0
    for first, last in pages:
        count += max(0, last - max(first, stop))
        stop = max(stop, last)
    return count * page_nbytes
