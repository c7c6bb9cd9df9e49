"""Cuts, saved sessions and nodes: what their files say, and every rule that a file can break."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.errors import ArgumentError, PackCorrupt, PackTooLarge
from kvplane.pack.chain import ID_NBYTES, Aux
from kvplane.pack.encoding import is_hex, is_text, sealed, unsealed
from kvplane.pack.fingerprint import Fingerprint
from kvplane.pack.geometries import geometry_of
from kvplane.pack.inputs import aux_of, decoded_ids, encoded_ids, unpacked
from kvplane.pack.limits import BLOCK, DOCUMENT_NBYTES, FORMAT, NODE_NBYTES
from kvplane.pack.state import (
    STATE_FIELDS,
    GroupRows,
    State,
    check,
    facts_by_group,
    is_count,
    state_of,
)

__all__ = ["Cut", "GroupRows", "Node", "SavedSession", "State"]

CUT_FIELDS = STATE_FIELDS | {"aux", "chain", "self", "tokens"}
SESSION_FIELDS = CUT_FIELDS | {"cursors", "geometry", "name", "parts", "template", "tokenizer"}
NODE_FIELDS = frozenset({"chain", "fingerprint", "format", "index", "parent", "self", "tokens"})
CURSOR_FIELDS = ("capacity", "length", "origin_logical", "origin_physical")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A prefix of a conversation that any prompt beginning with it can go on from.

    Args:
        state: its position, rows and provenance.
        chain: hex of the chain of its whole blocks.
        ids: of every position, u32 LE.
        aux: every other input that begins below the position.
    """

    state: State
    chain: str
    ids: bytes
    aux: tuple[Aux, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids as numbers."""
        return unpacked(self.ids)

    def encoded(self) -> bytes:
        """The file's bytes, which `decoded` reads: PackTooLarge, PackCorrupt."""
        fields = {
            **self.state.fields(),
            "aux": [list(item) for item in self.aux],
            "chain": self.chain,
            "tokens": encoded_ids(self.ids),
        }
        data = _bounded("cut", fields, DOCUMENT_NBYTES)
        self.decoded(data, "the cut to be written")
        return data

    @classmethod
    def decoded(cls, data: bytes, path: str) -> "Cut":
        """The cut in a file's bytes: PackCorrupt, PackVersion, PackTooLarge."""
        fields = _fields("cut", data, CUT_FIELDS, path)
        state = state_of(fields, path)
        check(state.position > 0, path, "a cut at position 0")
        check(bool(state.numerics), path, "numerics are missing")
        for name, facts in facts_by_group(state).items():
            needed = facts.needed_at(state.position)
            first = state.groups[name].first
            check(first == needed, path, f"first of {name} is {first}, not {needed}")
        ids = decoded_ids(fields["tokens"], path)
        check(len(ids) == ID_NBYTES * state.position, path, "tokens are not one a position")
        check(is_hex(fields["chain"]), path, "chain is no digest")
        aux = aux_of(fields["aux"], path, below=state.position)
        return cls(state=state, chain=fields["chain"], ids=ids, aux=aux)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """A session that a person saved under a name.

    Args:
        state: its position, every live row, and provenance.
        name: the name.
        cursors: by group id: (capacity, length, origin_logical, origin_physical).
        parts: the fingerprint's.
        geometry: the model's layers, as JSON without floats.
        chain: hex of the chain of whole blocks, with no salt; None unless ids of all positions
            from 0 are known.
        ids: of the positions from where the session began, u32 LE; None when they are not known.
        aux: every other input.
        tokenizer: whose ids these are; recorded, and only warned about.
        template: likewise.
    """

    state: State
    name: str
    cursors: Mapping[str, tuple[int, int, int, int]]
    parts: Mapping[str, Any]
    geometry: Mapping[str, Any]
    chain: str | None = None
    ids: bytes | None = None
    aux: tuple[Aux, ...] = ()
    tokenizer: str | None = None
    template: str | None = None

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """The ids as numbers."""
        return None if self.ids is None else unpacked(self.ids)

    @property
    def first_position(self) -> int:
        """Where the session began: the oldest row of a full layer, or the first id's position.

        Where neither says, 0: a rewind is then refused rather than guessed. Rows that begin above
        what the position needs say that the session began there.
        """
        firsts = {name: rows.first for name, rows in self.state.groups.items()}
        facts = facts_by_group(self.state)
        full = [firsts[name] for name in firsts if facts[name].sliding_window is None]
        if full:
            return full[0]
        if self.ids is not None:
            return self.state.position - len(self.ids) // ID_NBYTES
        position = self.state.position
        return max(
            (first for name, first in firsts.items() if first > facts[name].needed_at(position)),
            default=0,
        )

    def encoded(self) -> bytes:
        """The file's bytes, which `decoded` reads: PackTooLarge, PackCorrupt."""
        fields = {
            **self.state.fields(),
            "aux": [list(item) for item in self.aux],
            "chain": self.chain,
            "cursors": {
                group: dict(zip(CURSOR_FIELDS, cursor, strict=True))
                for group, cursor in self.cursors.items()
            },
            "geometry": self.geometry,
            "name": self.name,
            "parts": self.parts,
            "template": self.template,
            "tokenizer": self.tokenizer,
            "tokens": None if self.ids is None else encoded_ids(self.ids),
        }
        data = _bounded("session", fields, DOCUMENT_NBYTES)
        self.decoded(data, f"session {self.name}, to be written")
        return data

    @classmethod
    def decoded(cls, data: bytes, path: str) -> "SavedSession":
        """The session in a file's bytes: PackCorrupt, PackVersion, PackTooLarge."""
        fields = _fields("session", data, SESSION_FIELDS, path)
        state = state_of(fields, path)
        saved = cls(
            state=state,
            name=fields["name"],
            cursors=_cursors_of(fields["cursors"], state, path),
            parts=fields["parts"],
            geometry=fields["geometry"],
            chain=fields["chain"],
            ids=None if fields["tokens"] is None else decoded_ids(fields["tokens"], path),
            aux=aux_of(fields["aux"], path, below=state.position),
            tokenizer=fields["tokenizer"],
            template=fields["template"],
        )
        for what in ("tokenizer", "template"):
            check(fields[what] is None or is_text(fields[what]), path, f"{what} is no text")
        check(is_text(saved.name), path, "name is no text")
        _check_model(saved, path)
        _check_positions(saved, path)
        return saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A block that some prompt had: for reasons only, nothing is loaded through it."""

    fingerprint: str
    chain: str
    parent: str
    block: int
    ids: bytes

    def encoded(self) -> bytes:
        """The file's bytes."""
        fields = {
            "chain": self.chain,
            "fingerprint": self.fingerprint,
            "format": FORMAT,
            "index": self.block,
            "parent": self.parent,
            "tokens": encoded_ids(self.ids),
        }
        return _bounded("node", fields, NODE_NBYTES)

    @classmethod
    def decoded(cls, data: bytes, path: str) -> "Node":
        """The node in a file's bytes: PackCorrupt, PackVersion, PackTooLarge."""
        fields = _fields("node", data, NODE_FIELDS, path)
        for name in ("chain", "fingerprint", "parent"):
            check(is_hex(fields[name]), path, f"{name} is no digest")
        check(is_count(fields["index"]), path, "index is no block's number")
        ids = decoded_ids(fields["tokens"], path)
        check(len(ids) == ID_NBYTES * BLOCK, path, "tokens are not those of a block")
        return cls(
            fingerprint=fields["fingerprint"],
            chain=fields["chain"],
            parent=fields["parent"],
            block=fields["index"],
            ids=ids,
        )


def _bounded(kind: str, fields: dict[str, Any], limit: int) -> bytes:
    data = sealed(kind, fields)
    if len(data) > limit:
        raise PackTooLarge(what=f"the {kind} to be written", limit=limit, got=len(data))
    return data


def _fields(kind: str, data: bytes, expected: frozenset[str], path: str) -> dict[str, Any]:
    fields = unsealed(kind, data, path)
    if set(fields) != expected:
        odd = sorted(set(fields) ^ expected)
        raise PackCorrupt(path=path, what=f"fields unknown or missing: {', '.join(odd[:8])}")
    return fields


def _cursors_of(
    cursors: Any,  # noqa: ANN401 - any JSON value
    state: State,
    path: str,
) -> dict[str, tuple[int, int, int, int]]:
    good = isinstance(cursors, dict) and set(cursors) == set(state.groups)
    check(good, path, "cursors are not those of the groups")
    read = {}
    for name, cursor in cursors.items():
        good = isinstance(cursor, dict) and set(cursor) == set(CURSOR_FIELDS)
        check(good and all(map(is_count, cursor.values())), path, f"the cursor of {name}")
        capacity, length, origin_logical, origin_physical = (cursor[f] for f in CURSOR_FIELDS)
        fits = (
            length <= capacity
            and origin_physical < capacity
            and origin_logical == state.groups[name].first
            and origin_logical + length == state.position
        )
        check(fits, path, f"the cursor of {name} does not fit its rows")
        read[name] = (capacity, length, origin_logical, origin_physical)
    return read


def _check_model(saved: SavedSession, path: str) -> None:
    """Parts, geometry, fingerprint and groups all say the same model: PackCorrupt."""
    try:
        fingerprint = Fingerprint(saved.parts)
    except ArgumentError as error:
        raise PackCorrupt(path=path, what=f"parts: {error}") from error
    same = fingerprint.hex == saved.state.fingerprint
    check(same, path, "its parts do not give its fingerprint")
    geometry = geometry_of(saved.geometry, path)
    groups = {group.id: list(group.layers) for group in geometry.groups}
    check(groups == saved.parts["groups"], path, "geometry has other groups than its parts")
    check(set(groups) == set(saved.state.groups), path, "groups are not those of the model")


def _check_positions(saved: SavedSession, path: str) -> None:
    """Rows, ids and chain begin where the session began, and nothing needed is missing."""
    begin, position = saved.first_position, saved.state.position
    for name, facts in facts_by_group(saved.state).items():
        first = saved.state.groups[name].first
        if facts.sliding_window is None:
            check(first == begin, path, f"first of {name} is {first}, not {begin}")
        needed = max(begin, facts.needed_at(position))
        check(begin <= first <= needed, path, f"first of {name} is {first}, {needed} is needed")
    if saved.ids is not None:
        good = len(saved.ids) == ID_NBYTES * (position - begin) and begin >= 0
        check(good, path, "tokens are not one a position")
    whole = saved.ids is not None and begin == 0
    check((saved.chain is not None) == whole, path, "chain does not go with the tokens")
    check(saved.chain is None or is_hex(saved.chain), path, "chain is no digest")
