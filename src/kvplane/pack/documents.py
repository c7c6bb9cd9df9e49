"""What cuts and sessions say: the state to resume at, and every blob it needs.

Rows belong to whoever computed them: a document lists its own blobs, and nothing is resumed through
a name that another producer could have written.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvplane.errors import PackCorrupt, PackTooLarge
from kvplane.ledger import Span
from kvplane.pack.chain import Aux, packed_ids
from kvplane.pack.encoding import is_hex, sealed, unsealed
from kvplane.pack.limits import BLOCK, FORMAT, SPANS, TOKENS

Numerics = Mapping[str, Any]
STATE_FIELDS = frozenset(
    {"fingerprint", "format", "groups", "numerics", "canonical", "position", "states"}
)
CUT_FIELDS = STATE_FIELDS | {"aux", "chain", "self", "tokens"}
SESSION_FIELDS = CUT_FIELDS | {"cursors", "geometry", "name", "parts", "template", "tokenizer"}
CURSOR_FIELDS = frozenset({"capacity", "origin_logical", "origin_physical", "length"})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A prefix of a conversation that any prompt beginning with it can go on from."""

    state: State
    chain: str
    tokens: tuple[int, ...]
    aux: tuple[Aux, ...] = ()

    def encoded(self) -> bytes:
        """The file's bytes."""
        return sealed(
            "cut",
            {
                **self.state.fields(),
                "aux": [list(item) for item in self.aux],
                "chain": self.chain,
                "tokens": encoded_tokens(self.tokens),
            },
        )

    @classmethod
    def decoded(cls, data: bytes, path: str) -> "Cut":
        """The cut in a file's bytes: PackCorrupt, PackVersion, PackTooLarge."""
        fields = unsealed("cut", data, path)
        _check_fields(fields, CUT_FIELDS, path)
        tokens = decoded_tokens(fields["tokens"], path)
        state = state_of(fields, path)
        if len(tokens) != state.position or state.position < 1:
            raise PackCorrupt(path=path, what=f"{len(tokens)} tokens for position {state.position}")
        _check(is_hex(fields["chain"]), path, "chain is no digest")
        aux = aux_of(fields["aux"], path)
        return cls(state=state, chain=fields["chain"], tokens=tokens, aux=aux)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """A session that a person saved under a name."""

    state: State
    name: str
    cursors: Mapping[str, tuple[int, int, int, int]]
    parts: Mapping[str, Any]
    geometry: Mapping[str, Any]
    chain: str | None = None
    tokens: tuple[int, ...] | None = None
    aux: tuple[Aux, ...] = ()
    tokenizer: str | None = None
    template: str | None = field(default=None)

    def encoded(self) -> bytes:
        """The file's bytes."""
        names = ("capacity", "length", "origin_logical", "origin_physical")
        return sealed(
            "session",
            {
                **self.state.fields(),
                "aux": [list(item) for item in self.aux],
                "chain": self.chain,
                "cursors": {
                    group: dict(zip(names, cursor, strict=True))
                    for group, cursor in self.cursors.items()
                },
                "geometry": self.geometry,
                "name": self.name,
                "parts": self.parts,
                "template": self.template,
                "tokenizer": self.tokenizer,
                "tokens": None if self.tokens is None else encoded_tokens(self.tokens),
            },
        )

    @classmethod
    def decoded(cls, data: bytes, path: str) -> "SavedSession":
        """The session in a file's bytes: PackCorrupt, PackVersion, PackTooLarge."""
        fields = unsealed("session", data, path)
        _check_fields(fields, SESSION_FIELDS, path)
        state = state_of(fields, path)
        cursors = fields["cursors"]
        _check(isinstance(cursors, dict) and set(cursors) == set(state.groups), path, "cursors")
        for cursor in cursors.values():
            _check(isinstance(cursor, dict) and set(cursor) == CURSOR_FIELDS, path, "a cursor")
            _check(all(_is_count(number) for number in cursor.values()), path, "a cursor's numbers")
        for name, cursor in cursors.items():
            _check_cursor(name, cursor, state, path)
        chain, tokens = fields["chain"], fields["tokens"]
        _check((chain is None) == (tokens is None), path, "chain and tokens do not go together")
        _check(chain is None or is_hex(chain), path, "chain is no digest")
        ids = None if tokens is None else decoded_tokens(tokens, path)
        _check(ids is None or len(ids) <= state.position, path, "more tokens than positions")
        for what in ("tokenizer", "template"):
            _check(fields[what] is None or isinstance(fields[what], str), path, what)
        _check(isinstance(fields["parts"], dict), path, "parts")
        _check(isinstance(fields["geometry"], dict), path, "geometry")
        _check(isinstance(fields["name"], str), path, "name")
        return cls(
            state=state,
            name=fields["name"],
            cursors={
                name: (
                    cursor["capacity"],
                    cursor["length"],
                    cursor["origin_logical"],
                    cursor["origin_physical"],
                )
                for name, cursor in cursors.items()
            },
            parts=fields["parts"],
            geometry=fields["geometry"],
            chain=chain,
            tokens=ids,
            aux=aux_of(fields["aux"], path),
            tokenizer=fields["tokenizer"],
            template=fields["template"],
        )


def _check_cursor(name: str, cursor: Mapping[str, int], state: State, path: str) -> None:
    good = (
        cursor["capacity"] >= 1
        and cursor["length"] <= cursor["capacity"]
        and cursor["origin_physical"] < cursor["capacity"]
        and cursor["origin_logical"] == state.groups[name].first
        and cursor["origin_logical"] + cursor["length"] == state.position
    )
    _check(good, path, f"the cursor of {name} does not fit its rows")


def state_of(fields: Mapping[str, Any], path: str) -> State:
    """The state in a document's fields, with every rule of the format checked: PackCorrupt."""
    position, canonical = fields["position"], fields["canonical"]
    _check(_is_count(position) and position <= TOKENS, path, "position")
    _check(_is_count(canonical) and canonical <= position, path, "canonical")
    _check(is_hex(fields["fingerprint"]), path, "fingerprint is no digest")
    _check(fields["states"] is None or is_hex(fields["states"]), path, "states is no digest")
    groups = fields["groups"]
    _check(isinstance(groups, dict) and bool(groups), path, "groups")
    read = {name: _rows_of(name, rows, position, path) for name, rows in groups.items()}
    total = sum(len(rows.spans) for rows in read.values())
    if total > SPANS:
        raise PackTooLarge(what=f"{path}: spans", limit=SPANS, got=total)
    return State(
        fingerprint=fields["fingerprint"],
        position=position,
        groups=read,
        numerics=_numerics_of(fields["numerics"], position, path),
        canonical=canonical,
        states=fields["states"],
    )


def _rows_of(name: str, rows: Any, position: int, path: str) -> GroupRows:  # noqa: ANN401
    _check(isinstance(rows, dict) and set(rows) == {"first", "spans"}, path, f"rows of {name}")
    first, spans = rows["first"], rows["spans"]
    _check(_is_count(first) and first <= position, path, f"first of {name}")
    _check(isinstance(spans, list), path, f"spans of {name}")
    end = first
    read = []
    for span in spans:
        good = (
            isinstance(span, list)
            and len(span) == 3  # noqa: PLR2004 - first, stop, blob
            and _is_count(span[0])
            and _is_count(span[1])
            and is_hex(span[2])
        )
        _check(good, path, f"a span of {name}")
        _check(span[0] == end < span[1], path, f"spans of {name} are not ascending without holes")
        _check(span[0] // BLOCK == (span[1] - 1) // BLOCK, path, f"a span of {name} leaves a block")
        end = span[1]
        read.append(Span(*span))
    _check(end == position, path, f"spans of {name} end at {end}, not at {position}")
    return GroupRows(first=first, spans=tuple(read))


def _numerics_of(runs: Any, position: int, path: str) -> tuple[tuple[int, Numerics], ...]:  # noqa: ANN401
    _check(isinstance(runs, list), path, "numerics")
    end = 0
    read = []
    for run in runs:
        good = (
            isinstance(run, list)
            and len(run) == 2  # noqa: PLR2004 - stop, numerics
            and _is_count(run[0])
            and isinstance(run[1], dict)
            and all(value is None or type(value) in (str, int) for value in run[1].values())
        )
        _check(good, path, "a run of numerics")
        _check(end < run[0], path, "numerics are not ascending")
        end = run[0]
        read.append((run[0], run[1]))
    _check(end == position or (position == 0 and not runs), path, "numerics end elsewhere")
    return tuple(read)


def aux_of(items: Any, path: str) -> tuple[Aux, ...]:  # noqa: ANN401
    """Other inputs than tokens: PackCorrupt."""
    _check(isinstance(items, list), path, "aux")
    for item in items:
        good = (
            isinstance(item, list)
            and len(item) == 4  # noqa: PLR2004 - first, stop, type, digest
            and _is_count(item[0])
            and _is_count(item[1])
            and item[0] < item[1]
            and isinstance(item[2], str)
            and is_hex(item[3])
        )
        _check(good, path, "an aux item")
    return tuple(Aux(*item) for item in items)


def encoded_tokens(tokens: Sequence[int]) -> str:
    """base64 of u32 LE."""
    return base64.b64encode(packed_ids(tokens)).decode()


def decoded_tokens(text: Any, path: str) -> tuple[int, ...]:  # noqa: ANN401
    """Ids from base64 of u32 LE: PackCorrupt."""
    _check(isinstance(text, str), path, "tokens are no text")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise PackCorrupt(path=path, what=f"tokens are no base64: {error}") from error
    _check(len(data) % 4 == 0, path, "tokens are not whole ids")
    if len(data) // 4 > TOKENS:
        raise PackTooLarge(what=f"{path}: tokens", limit=TOKENS, got=len(data) // 4)
    _check(base64.b64encode(data).decode() == text, path, "tokens are not canonical base64")
    return tuple(np.frombuffer(data, dtype="<u4").tolist())


def _check_fields(fields: Mapping[str, Any], expected: frozenset[str], path: str) -> None:
    if set(fields) != expected:
        odd = sorted(set(fields) ^ expected)
        raise PackCorrupt(path=path, what=f"fields unknown or missing: {', '.join(odd[:8])}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check(good: bool, path: str, what: str) -> None:  # noqa: FBT001 - one check a line
    if not good:
        raise PackCorrupt(path=path, what=what)
