"""What cuts and sessions share: a position to resume at, and every blob it needs.

Rows belong to whoever computed them: a document lists its own blobs, and nothing is resumed through
a name that another producer could have written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.errors import PackCorrupt, PackTooLarge
from kvplane.ledger import Span
from kvplane.pack.encoding import is_hex
from kvplane.pack.ids import GroupFacts, facts_of
from kvplane.pack.limits import BLOCK, FORMAT, SPANS, TOKENS

Numerics = Mapping[str, Any]
STATE_FIELDS = frozenset(
    {"fingerprint", "format", "groups", "numerics", "canonical", "position", "states"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """A layer group's rows: positions [first, position of the state)."""

    first: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A position to resume at.

    Args:
        fingerprint: hex of the model's.
        position: the next position.
        groups: by group id.
        numerics: (stop, numerics) runs; the last stop is the position.
        canonical: the rows below were made on the canonical schedule by one numerics.
        states: blob of recurrent and convolution states; None for a model without.
    """

    fingerprint: str
    position: int
    groups: Mapping[str, GroupRows]
    numerics: tuple[tuple[int, Numerics], ...]
    canonical: int
    states: str | None = None

    @property
    def blobs(self) -> set[str]:
        """Every blob it names."""
        named = {span.blob for rows in self.groups.values() for span in rows.spans}
        return named if self.states is None else named | {self.states}

    @property
    def num_spans(self) -> int:
        """Spans of all groups."""
        return sum(len(rows.spans) for rows in self.groups.values())

    def fields(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "fingerprint": self.fingerprint,
            "format": FORMAT,
            "groups": {
                name: {"first": rows.first, "spans": [list(span) for span in rows.spans]}
                for name, rows in self.groups.items()
            },
            "numerics": [[stop, dict(numerics)] for stop, numerics in self.numerics],
            "canonical": self.canonical,
            "position": self.position,
            "states": self.states,
        }


def facts_by_group(state: State) -> dict[str, GroupFacts]:
    """What the ids of a state's groups say; a state that was read has no other."""
    facts = {name: facts_of(name) for name in state.groups}
    return {name: known for name, known in facts.items() if known is not None}


def state_of(fields: Mapping[str, Any], path: str) -> State:
    """The state in a document's fields, with the rules that cuts and sessions share checked.

    Raises:
        PackCorrupt, PackTooLarge: names the field.
    """
    position, canonical = fields["position"], fields["canonical"]
    check(is_count(position), path, "position is no position")
    if position > TOKENS:
        raise PackTooLarge(what=f"{path}: position", limit=TOKENS, got=position)
    check(is_hex(fields["fingerprint"]), path, "fingerprint is no digest")
    check(fields["states"] is None or is_hex(fields["states"]), path, "states is no digest")
    groups = fields["groups"]
    check(isinstance(groups, dict) and bool(groups), path, "groups are no groups")
    read = {name: _rows_of(name, rows, position, path) for name, rows in groups.items()}
    state = State(
        fingerprint=fields["fingerprint"],
        position=position,
        groups=read,
        numerics=_numerics_of(fields["numerics"], position, path),
        canonical=canonical,
        states=fields["states"],
    )
    if state.num_spans > SPANS:
        raise PackTooLarge(what=f"{path}: spans", limit=SPANS, got=state.num_spans)
    check(bool(state.numerics) or not state.num_spans, path, "numerics of its rows are missing")
    check(is_count(canonical) and _is_canonical(state), path, "canonical is no such position")
    return state


def _is_canonical(state: State) -> bool:
    """Whether whole chunks of one numerics can reach as far as a state says."""
    if state.canonical == 0:
        return True
    if not state.numerics or any(rows.first > 0 for rows in _full_rows(state)):
        return False
    stop, numerics = state.numerics[0]
    return state.canonical <= stop and state.canonical % numerics["chunk"] == 0


def _full_rows(state: State) -> list[GroupRows]:
    facts = facts_by_group(state)
    return [rows for name, rows in state.groups.items() if facts[name].sliding_window is None]


def _rows_of(name: str, rows: Any, position: int, path: str) -> GroupRows:  # noqa: ANN401
    check(facts_of(name) is not None, path, f"{name[:80]!r} is no group's id")
    check(isinstance(rows, dict) and set(rows) == {"first", "spans"}, path, f"rows of {name}")
    first, spans = rows["first"], rows["spans"]
    check(is_count(first) and first <= position, path, f"first of {name} is no such position")
    check(isinstance(spans, list), path, f"spans of {name} are no list")
    end = first
    read = []
    for span in spans:
        check(_is_span(span), path, f"a span of {name} is not first, stop and blob")
        check(span[0] == end < span[1], path, f"spans of {name} are not ascending without holes")
        check(span[0] // BLOCK == (span[1] - 1) // BLOCK, path, f"a span of {name} leaves a block")
        end = span[1]
        read.append(Span(*span))
    check(end == position, path, f"spans of {name} end at {end}, not at {position}")
    return GroupRows(first=first, spans=tuple(read))


def _is_span(span: object) -> bool:
    return (
        isinstance(span, list)
        and len(span) == len(Span._fields)
        and is_count(span[0])
        and is_count(span[1])
        and is_hex(span[2])
    )


def _numerics_of(runs: Any, position: int, path: str) -> tuple[tuple[int, Numerics], ...]:  # noqa: ANN401
    check(isinstance(runs, list), path, "numerics are no list")
    end = 0
    read: list[tuple[int, Numerics]] = []
    for run in runs:
        check(
            isinstance(run, list) and len(run) == 2 and is_count(run[0]) and is_numerics(run[1]),  # noqa: PLR2004 - stop, numerics
            path,
            "a run of numerics is not its stop and its object",
        )
        check(end < run[0], path, "numerics are not ascending")
        check(not read or read[-1][1] != run[1], path, "two runs of equal numerics are one")
        end = run[0]
        read.append((run[0], run[1]))
    check(not runs or end == position, path, f"numerics end at {end}, not at {position}")
    return tuple(read)


def is_numerics(value: object) -> bool:
    """Whether a JSON value can say who made rows: flat, of text and numbers, with its chunk."""
    if not isinstance(value, dict):
        return False
    flat = all(kept is None or type(kept) in (str, int) for kept in value.values())
    chunk = value.get("chunk")
    return flat and type(chunk) is int and chunk >= 1


def is_count(value: object) -> bool:
    """Whether a JSON value is a whole number of at least 0."""
    return type(value) is int and value >= 0


def check(good: bool, path: str, what: str) -> None:  # noqa: FBT001 - one check a line
    """Refuse a document by what is wrong with it: PackCorrupt."""
    if not good:
        raise PackCorrupt(path=path, what=what)
