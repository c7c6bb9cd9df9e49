"""Prefixes: what was read once need not be read again, also on sliding-window models."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvplane.errors import ArgumentError, PackError
from kvplane.pack.chain import ID_NBYTES, Aux, Chain, packed_ids
from kvplane.pack.content import put_content
from kvplane.pack.documents import Cut, Node
from kvplane.pack.fingerprint import Fingerprint
from kvplane.pack.inputs import ordered
from kvplane.pack.lease import Lease
from kvplane.pack.limits import BLOCK, DOCUMENT_NBYTES
from kvplane.pack.match import Match, Matcher, cut_folder, cut_names, node_file, sealed_name
from kvplane.pack.policy import Policy, every, wished_cuts
from kvplane.pack.reader import Loaded, load_state
from kvplane.pack.root import open_root
from kvplane.pack.source import RowSource
from kvplane.pack.writer import (
    Codec,
    Written,
    canonical_until,
    check_present,
    numerics_until,
    state_at,
)
from kvplane.session import Session
from kvplane.storage import Storage
from kvplane.store import KVStore

__all__ = ["Policy", "PrefixCache", "every", "wished_cuts"]


class PrefixCache:
    """Cuts of one model in one root.

    Args:
        root: a folder, an address, or an open storage.
        fingerprint: of the model that reads and writes.
        salt: of the tenant: others with another salt find nothing.
        create: make the root where there is none.
        codec: of the blobs of rows that are written.

    Raises:
        StorageError, PackCorrupt, PackVersion: as `open_root`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        fingerprint: Fingerprint,
        *,
        salt: bytes = b"",
        create: bool = True,
        codec: Codec = Codec.RAW,
    ) -> None:
        self.storage = open_root(root, create=create)
        self.fingerprint = fingerprint
        self._salt = salt
        self._codec = codec
        # cuts that did not load: no reason to leave out a new one of equal tokens
        self._failed: set[str] = set()

    def match(
        self,
        tokens: Sequence[int],
        store: KVStore | None = None,
        *,
        aux: Sequence[Aux] = (),
        strict: bool = False,
    ) -> Match:
        """The deepest cut that the prompt starts with, never past its last token but one.

        Args:
            tokens: ids of the prompt.
            store: the one that will go on: cuts of its own numerics are preferred.
            aux: other inputs than tokens.
            strict: only cuts whose rows a cold run on the canonical schedule would have, bit for
                bit, by this store's numerics.

        Raises:
            ArgumentError: ids outside 32 bits, or strict without a store.
            PackMismatch: the store has other layer groups than the fingerprint.
        """
        return next(self._matcher(store).matches(tokens, aux=aux, strict=strict))

    def load(
        self,
        tokens: Sequence[int],
        store: KVStore,
        *,
        aux: Sequence[Aux] = (),
        strict: bool = False,
        remember: bool = False,
    ) -> tuple[Match, Loaded | None]:
        """The deepest cut's session; a cut whose blobs turn out damaged is passed over, once.

        Returns:
            The match, and what was loaded; None when nothing can be reused.

        Raises:
            PackError: a second cut was damaged as well. Nothing was made.
            ArgumentError, PackMismatch: as `match`.
            LimitReached, MemoryUnavailable, SnapshotMismatch: as `KVStore.builder`.
        """
        failed: PackError | None = None
        found = Match(position=0, seen=0, reason="")
        for found in self._matcher(store).matches(tokens, aux=aux, strict=strict):
            if found.cut is None or found.file is None:
                break
            try:
                loaded = self._load(found.cut, found.file, store, remember=remember)
            except PackError as error:
                if failed is not None:
                    raise
                failed = error
                self._failed.add(found.file)
                continue
            self._touch(found.file)
            return _after(failed, found), loaded
        return _after(failed, found), None

    def _load(self, cut: Cut, file: str, store: KVStore, *, remember: bool) -> Loaded:
        position = cut.state.position
        cursors = {}
        for group in store.geometry.groups:
            first = cut.state.groups[group.id].first
            capacity = store.plan.capacities[group.id]
            # where a session that was born at 0 holds them
            row = divmod(first, capacity)[1]
            cursors[group.id] = (capacity, position - first, first, row)
        return load_state(
            self.storage,
            cut.state,
            store,
            cursors=cursors,
            first_position=0,
            tokens=cut.tokens if remember else None,
            needed_by=f"cut {file}",
        )

    def _touch(self, file: str) -> None:
        try:
            self.storage.touch(file)
        except PackError:
            # whoever may only read cannot say that it was used
            return

    def publish(
        self,
        session: Session,
        tokens: Sequence[int] | None = None,
        *,
        position: int | None = None,
        aux: Sequence[Aux] = (),
        states: Mapping[str, Tensor] | None = None,
    ) -> tuple[Cut | None, Written]:
        """Take a cut, so that prompts which begin with these tokens can go on from it.

        Args:
            session: with no step open.
            tokens: ids of the whole session, or at least up to the cut; None takes those that it
                remembers.
            position: the cut: the session's own, or one that a step captured; None: the session's.
            aux: other inputs than tokens.
            states: of recurrent and convolution layers at the cut.

        Returns:
            The cut; None when one as good is there already, or at position 0.

        Raises:
            ArgumentError: a session that began elsewhere or has a batch axis, too few ids, others
                than it remembers, or rows that are not held.
            PackMismatch: the session has other layer groups than the fingerprint.
            StepOpen, SessionClosed, SessionBusy: the session is in use.
            StorageError: something could not be written; no cut names what was.
        """
        with session.guard:
            session.check_open()
            session.check_idle()
            self.fingerprint.check_groups(session.groups)
            at = session.position if position is None else position
            ids = _ids(session, tokens, at)
            if at == 0:
                return None, Written()
            held = ordered(aux, below=at)
            with Lease(self.storage) as lease:
                cut, written = self._published(session, at, ids, held, states, lease)
            session.captures.pop(at, None)
            session.marks.discard(at)
            return cut, written

    def _published(
        self,
        session: Session,
        at: int,
        ids: bytes,
        aux: tuple[Aux, ...],
        states: Mapping[str, Tensor] | None,
        lease: Lease,
    ) -> tuple[Cut | None, Written]:
        source = RowSource(session, capture=session.captures.get(at))
        chain = Chain.packed(self.fingerprint.hex, ids, aux=aux, salt=self._salt)
        if self._as_good(source, chain, ids, aux, at):
            return None, Written()
        firsts = {}
        for group in session.groups:
            window = group.sliding_window
            first = firsts[group.id] = 0 if window is None else max(0, at - (window - 1))
            if source.first_held(group) > first and first < at:
                expected = f"positions from {first} of {group.id}"
                got = source.first_held(group)
                raise ArgumentError(argument="position", expected=expected, got=got)

        def put() -> tuple[Cut, Written]:
            state, written = state_at(
                source,
                self.storage,
                lease,
                fingerprint=self.fingerprint.hex,
                position=at,
                firsts=firsts,
                states=states,
                codec=self._codec,
            )
            cut = Cut(state=state, chain=chain.at(at // BLOCK), ids=ids, aux=aux)
            data = cut.encoded()
            put_content(self.storage, sealed_name(cut, chain.tail(at), data), data)
            return cut, written

        cut, written = put()
        if check_present(self.storage, cut.state):
            # somebody swept a blob between its naming and this: put it again from the rows
            cut, again = put()
            written.add(again)
        self._index(ids, chain)
        return cut, written

    def _as_good(
        self, source: RowSource, chain: Chain, ids: bytes, aux: tuple[Aux, ...], position: int
    ) -> bool:
        """Whether a valid cut of equal tokens and numerics is there, as canonical as this one."""
        folder = cut_folder(self.fingerprint.hex, chain.at(position // BLOCK))
        for name in cut_names(self.storage, folder):
            if name.position != position or name.tail != chain.tail(position):
                continue
            if name.file in self._failed:
                continue
            try:
                data = self.storage.read(name.file, limit=DOCUMENT_NBYTES)
                cut = Cut.decoded(data, name.file)
            except PackError:
                continue
            state = cut.state
            if (
                sealed_name(cut, name.tail, data) == name.file
                and (cut.ids, cut.aux) == (ids, aux)
                and set(state.groups) == set(self.fingerprint.parts["groups"])
                and state.numerics == numerics_until(source, position)
                and state.canonical >= canonical_until(source, position)
                and not check_present(self.storage, state)
            ):
                return True
        return False

    def _index(self, ids: bytes, chain: Chain) -> None:
        """Put the nodes of blocks that have none: only reasons come of them."""
        missing = []
        for block in range(len(ids) // ID_NBYTES // BLOCK - 1, -1, -1):
            if self.storage.exists(node_file(self.fingerprint.hex, chain.at(block + 1))):
                break
            missing.append(block)
        for block in reversed(missing):
            node = Node(
                fingerprint=self.fingerprint.hex,
                chain=chain.at(block + 1),
                parent=chain.at(block),
                block=block,
                ids=ids[ID_NBYTES * BLOCK * block : ID_NBYTES * BLOCK * (block + 1)],
            )
            file = node_file(node.fingerprint, node.chain)
            put_content(self.storage, file, node.encoded(), durable=False)

    def _matcher(self, store: KVStore | None) -> Matcher:
        if store is not None:
            self.fingerprint.check_groups(store.geometry.groups)
        return Matcher(
            self.storage,
            self.fingerprint,
            numerics=None if store is None else store.numerics,
            salt=self._salt,
        )


def _ids(session: Session, tokens: Sequence[int] | None, at: int) -> bytes:
    """The packed ids below a cut, once they can be those of its rows: ArgumentError."""
    if session.batch is not None or session.first_position:
        expected = "one sequence, from position 0"
        got = f"{session.num_sequences} from position {session.first_position}"
        raise ArgumentError(argument="session", expected=expected, got=got)
    if not 0 <= at <= session.position:
        expected = f"within [0, {session.position}]"
        raise ArgumentError(argument="position", expected=expected, got=at)
    known = session.ids[0][:at] if session.ids is not None else None
    given = known if tokens is None else tokens[:at]
    if given is None or len(given) < at:
        num_ids = 0 if given is None else len(given)
        raise ArgumentError(argument="tokens", expected=f"at least {at} ids", got=num_ids)
    ids = packed_ids(given)
    if known is not None and ids != packed_ids(known):
        expected = "the ids that the session remembers"
        raise ArgumentError(argument="tokens", expected=expected, got="others")
    return ids


def _after(failed: PackError | None, match: Match) -> Match:
    """The match, with the reason that a deeper cut was of no use."""
    if failed is None:
        return match
    return replace(match, reason=f"a deeper cut is damaged: {failed}")
