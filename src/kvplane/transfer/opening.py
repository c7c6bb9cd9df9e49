"""What a sender states before any row: everything that the receiver's planes must agree with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.errors import ArgumentError, PackError, PackVersion
from kvplane.geometry import ModelGeometry
from kvplane.ledger import Numerics
from kvplane.pack.encoding import canonical, digest, framed, is_hex, parsed
from kvplane.pack.fingerprint import parts_problem
from kvplane.pack.geometries import geometry_fields, geometry_of
from kvplane.pack.limits import FORMAT, TOKENS
from kvplane.pack.state import is_count, is_numerics
from kvplane.ring import RingCursor
from kvplane.snapshot import Cursor
from kvplane.transfer.errors import TransferCorrupt, TransferVersion
from kvplane.transfer.schedule import Schedule

LAYOUTS = ("HND", "NHD")
ID_NBYTES = 4
NUMERICS = 1024
_CURSOR_FIELDS = 4
_RUN_FIELDS = 2
_FIELDS = frozenset(
    {
        "canonical",
        "chunk",
        "cursors",
        "fingerprint",
        "first_position",
        "format",
        "geometry",
        "layouts",
        "numerics",
        "position",
        "schedule",
        "tokens",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A session about to be sent.

    Args:
        geometry: of the model, with the dtype of the rows.
        fingerprint: parts of the model's; None where the sender knows none.
        position: the next one, which the receiver runs itself.
        first_position: where the session began.
        cursors: by group id: (capacity, length, origin_logical, origin_physical) of the rows that
            a whole handoff sends: the window and where it lies in its ring.
        layouts: by group id: how the rows of a segment lie, "NHD" or "HND".
        tokens: hex digest over the ids, which follow; None where they are not known.
        numerics: (stop, numerics) runs of the rows.
        canonical: the rows below were made on the canonical schedule by one numerics.
        schedule: name of the order.
        chunk: of the schedule.
    """

    geometry: ModelGeometry
    fingerprint: Mapping[str, Any] | None
    position: int
    first_position: int
    cursors: Mapping[str, Cursor]
    layouts: Mapping[str, str]
    tokens: str | None
    numerics: tuple[tuple[int, Numerics], ...]
    canonical: int
    schedule: str
    chunk: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the session."""
        return self.position - self.first_position

    @property
    def ids_nbytes(self) -> int:
        """Bytes of the ids that follow."""
        return 0 if self.tokens is None else ID_NBYTES * self.num_tokens

    def plan(self, cut: int) -> Schedule:
        """The segments to a receiver that holds [0, cut): ArgumentError."""
        return Schedule(
            geometry=self.geometry,
            position=self.position,
            cut=cut,
            name=self.schedule,
            chunk=self.chunk,
            first_position=self.first_position,
            held={name: cursor[2] for name, cursor in self.cursors.items()},
        )

    def encoded(self) -> bytes:
        """The canonical bytes."""
        return canonical(
            {
                "canonical": self.canonical,
                "chunk": self.chunk,
                "cursors": {name: list(cursor) for name, cursor in self.cursors.items()},
                "fingerprint": None if self.fingerprint is None else dict(self.fingerprint),
                "first_position": self.first_position,
                "format": FORMAT,
                "geometry": geometry_fields(self.geometry),
                "layouts": dict(self.layouts),
                "numerics": [[stop, dict(numerics)] for stop, numerics in self.numerics],
                "position": self.position,
                "schedule": self.schedule,
                "tokens": self.tokens,
            }
        )

    @classmethod
    def decoded(cls, data: bytes) -> "Opening":
        """The opening in a body: TransferCorrupt when it is none."""
        fields = document(data, "opening", _FIELDS)
        try:
            geometry = geometry_of(fields["geometry"], "opening")
        except PackError as error:
            raise TransferCorrupt(what=str(error)) from error
        position, first_position = fields["position"], fields["first_position"]
        _check(is_count(position) and 0 < position <= TOKENS, "position")
        _check(is_count(first_position) and first_position < position, "first_position")
        names = {group.id for group in geometry.groups}
        _check(bool(names), "geometry: no layer has rows")
        given, layouts = fields["cursors"], fields["layouts"]
        _check(isinstance(given, dict) and set(given) == names, "cursors: other groups")
        cursors = {name: _cursor(name, given[name], position) for name in given}
        _check(isinstance(layouts, dict) and set(layouts) == names, "layouts: other groups")
        _check(all(layout in LAYOUTS for layout in layouts.values()), "layouts")
        _check_begin(geometry, cursors, first_position)
        parts = fields["fingerprint"]
        problem = None if parts is None else parts_problem(parts)
        _check(problem is None, f"fingerprint: {problem}")
        tokens = fields["tokens"]
        _check(tokens is None or is_hex(tokens), "tokens")
        made = cls(
            geometry=geometry,
            fingerprint=parts,
            position=position,
            first_position=first_position,
            cursors=cursors,
            layouts=layouts,
            tokens=tokens,
            numerics=_numerics(fields["numerics"], position),
            canonical=fields["canonical"],
            schedule=fields["schedule"],
            chunk=fields["chunk"],
        )
        _check(is_count(made.canonical) and made.canonical <= position, "canonical")
        _check(not made.canonical or bool(made.numerics), "canonical")
        try:
            made.plan(0)
        except (ArgumentError, TypeError) as error:
            raise TransferCorrupt(what=f"opening: {error}") from error
        return made


def document(data: bytes, what: str, names: frozenset[str]) -> dict[str, Any]:
    """The canonical JSON object of a body, with just these fields.

    Raises:
        TransferVersion: its "format" is another.
        TransferCorrupt: it is none, or has others.
    """
    try:
        fields = parsed(data, what)
    except PackVersion as error:
        raise TransferVersion(expected=FORMAT, got=error.got) from error
    except PackError as error:
        raise TransferCorrupt(what=str(error)) from error
    if set(fields) != names:
        raise TransferCorrupt(what=f"{what}: has the fields {sorted(fields)[:16]}")
    return fields


def ids_digest(packed: bytes) -> str:
    """Hex digest over ids, u32 LE."""
    return digest(framed(b"kvplane/transfer/ids/1"), framed(packed)).hex()


def _cursor(name: str, fields: Any, position: int) -> Cursor:  # noqa: ANN401 - any JSON value
    _check(isinstance(fields, list) and len(fields) == _CURSOR_FIELDS, f"cursor of {name}")
    try:
        cursor = RingCursor(*fields)
    except ArgumentError as error:
        raise TransferCorrupt(what=f"opening: cursor of {name}: {error}") from error
    _check(cursor.next_position == position, f"cursor of {name} is at another position")
    return cursor.as_tuple()


def _check_begin(
    geometry: ModelGeometry, cursors: Mapping[str, Cursor], first_position: int
) -> None:
    """Refuse rows from before the session began, and full layers that lack their first ones."""
    for group in geometry.groups:
        first = cursors[group.id][2]
        whole = group.is_sliding or first == first_position
        _check(first >= first_position and whole, f"cursor of {group.id} begins at {first}")


def _numerics(runs: Any, position: int) -> tuple[tuple[int, Numerics], ...]:  # noqa: ANN401
    _check(isinstance(runs, list) and len(runs) <= NUMERICS, "numerics")
    end = 0
    read = []
    for run in runs:
        good = isinstance(run, list) and len(run) == _RUN_FIELDS and is_count(run[0])
        _check(good and end < run[0] <= position and is_numerics(run[1]), "numerics")
        end = run[0]
        read.append((run[0], run[1]))
    return tuple(read)


def _check(good: bool, what: str) -> None:  # noqa: FBT001 - one check a line
    if not good:
        raise TransferCorrupt(what=f"opening: {what}")
