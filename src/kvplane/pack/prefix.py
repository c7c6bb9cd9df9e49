"""Prefixes: what was read once need not be read again, also on sliding-window models."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvplane.errors import ArgumentError, PackError
from kvplane.geometry import LayerGroup
from kvplane.pack.chain import Aux, Chain
from kvplane.pack.documents import Cut, encoded_tokens
from kvplane.pack.encoding import sealed
from kvplane.pack.fingerprint import Fingerprint
from kvplane.pack.limits import BLOCK, FORMAT
from kvplane.pack.match import Match, Matcher, cut_folder, cut_names, node_file, sealed_name
from kvplane.pack.reader import Loaded, load_state
from kvplane.pack.root import open_root
from kvplane.pack.writer import RowSource, Written, check_present, state_at
from kvplane.session import Session
from kvplane.storage import Storage
from kvplane.store import KVStore

EVERY_LEAST = 2048


def every(groups: Sequence[LayerGroup]) -> int:
    """Between cuts of a long prompt: max(2048, 4 x largest window), rounded up to blocks."""
    largest = max((group.sliding_window or 0 for group in groups), default=0)
    return -(-max(EVERY_LEAST, 4 * largest) // BLOCK) * BLOCK


def wished_cuts(first: int, stop: int, groups: Sequence[LayerGroup], *, chunk: int) -> list[int]:
    """Where cuts are taken while positions [first, stop) of a prompt are read.

    At the last multiple of the chunk, at the end itself, and on the way every `every(groups)`.
    """
    step = every(groups)
    wished = set(range(first - first % step + step, stop, step))
    wished |= {stop - stop % chunk, stop}
    return sorted(cut for cut in wished if first < cut <= stop)


class PrefixCache:
    """Cuts of one model in one root.

    Args:
        root: a folder, an address, or an open storage.
        fingerprint: of the model that reads and writes.
        salt: of the tenant: others with another salt find nothing.
        create: make the root where there is none.

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
    ) -> None:
        self.storage = open_root(root, create=create)
        self.fingerprint = fingerprint
        self._salt = salt

    def match(
        self,
        tokens: Sequence[int],
        store: KVStore,
        *,
        aux: Sequence[Aux] = (),
        strict: bool = False,
    ) -> Match:
        """The deepest cut that the prompt starts with, never past its last token but one.

        Args:
            tokens: ids of the prompt.
            store: the one that will go on: its numerics and groups count.
            aux: other inputs than tokens.
            strict: only cuts whose rows a cold run on the canonical schedule would have, bit for
                bit, by this store's numerics.
        """
        return next(iter(self._matcher(store).matches(tokens, aux=aux, strict=strict)))

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
            LimitReached, MemoryUnavailable: as `KVStore.builder`.
        """
        failed: PackError | None = None
        for match in self._matcher(store).matches(tokens, aux=aux, strict=strict):
            if match.cut is None or match.file is None:
                return _after(failed, match), None
            try:
                loaded = self._load(match.cut, match.file, store, remember=remember)
            except PackError as error:
                if failed is not None:
                    raise
                failed = error
                continue
            self.storage.touch(match.file)
            return _after(failed, match), loaded
        return Match(position=0, seen=0, reason="nothing is stored"), None

    def _load(self, cut: Cut, file: str, store: KVStore, *, remember: bool) -> Loaded:
        position = cut.state.position
        cursors = {}
        for group in store.geometry.groups:
            first = cut.state.groups[group.id].first
            capacity = store.plan.capacities[group.id]
            row = divmod(first, capacity)[1]
            cursors[group.id] = (capacity, position - first, first, row)
        return load_state(
            self.storage,
            cut.state,
            store,
            cursors=cursors,
            tokens=cut.tokens if remember else None,
            needed_by=f"cut {file}",
        )

    def publish(
        self,
        session: Session,
        tokens: Sequence[int],
        *,
        position: int | None = None,
        aux: Sequence[Aux] = (),
        states: Mapping[str, Tensor] | None = None,
    ) -> tuple[Cut | None, Written]:
        """Take a cut, so that prompts which begin with these tokens can go on from it.

        Args:
            session: with no step open.
            tokens: ids of the whole session, or at least up to the cut.
            position: the cut: the session's own, or one that a step captured; None: the session's.
            aux: other inputs than tokens.
            states: of recurrent and convolution layers at the cut.

        Returns:
            The cut; None when one as good is there already, or at position 0.

        Raises:
            ArgumentError: a session that began elsewhere, too few ids, or rows that are not held.
            StorageError: something could not be written; no cut names what was.
        """
        at = session.position if position is None else position
        if session.first_position or len(tokens) < at:
            expected = f"a session from position 0 with at least {at} ids"
            raise ArgumentError(argument="session", expected=expected, got=len(tokens))
        ids = tuple(tokens[:at])
        held = tuple(item for item in aux if item.first < at)
        if at == 0:
            return None, Written()
        chain = Chain(self.fingerprint.hex, ids, aux=held, salt=self._salt)
        if self._as_good(session, chain, at):
            return None, Written()
        captured = session.captures.get(at)
        source = RowSource(session, captured=captured.rows if captured else None, cut=at)
        firsts = {
            group.id: 0 if group.sliding_window is None else max(0, at - (group.sliding_window - 1))
            for group in session.groups
        }
        for group in session.groups:
            if source.first_held(group) > firsts[group.id] and firsts[group.id] < at:
                expected = f"positions from {firsts[group.id]} of {group.id}"
                raise ArgumentError(
                    argument="position", expected=expected, got=source.first_held(group)
                )

        def made() -> tuple[Cut, Written]:
            state, written = state_at(
                session,
                self.storage,
                fingerprint=self.fingerprint.hex,
                position=at,
                firsts=firsts,
                source=source,
                states=states,
            )
            return Cut(state=state, chain=chain.at(at // BLOCK), tokens=ids, aux=held), written

        cut, written = made()
        self._put(cut, chain)
        if check_present(self.storage, cut.state):
            cut, again = made()
            self._put(cut, chain)
            written.nbytes_written += again.nbytes_written
        self._index(ids, chain)
        session.captures.pop(at, None)
        session.marks.discard(at)
        return cut, written

    def _put(self, cut: Cut, chain: Chain) -> None:
        data = cut.encoded()
        self.storage.put(sealed_name(cut, chain.tail(cut.state.position), data), data)

    def _as_good(self, session: Session, chain: Chain, position: int) -> bool:
        """Whether a valid cut of equal tokens and numerics is there, as canonical as this one."""
        folder = cut_folder(self.fingerprint.hex, chain.at(position // BLOCK))
        canonical = min(session.ledger.canonical, position)
        numerics = [dict(made) for _, made in session.ledger.numerics]
        for name in cut_names(self.storage, folder):
            if name.position != position or name.tail != chain.tail(position):
                continue
            try:
                data = self.storage.read(name.file, limit=64 << 20)
                cut = Cut.decoded(data, name.file)
            except PackError:
                continue
            same = [dict(made) for _, made in cut.state.numerics] == numerics
            if (
                same
                and cut.state.canonical >= canonical
                and not check_present(self.storage, cut.state)
            ):
                return True
        return False

    def _index(self, ids: Sequence[int], chain: Chain) -> None:
        for block in range(len(ids) // BLOCK):
            here = chain.at(block + 1)
            file = node_file(self.fingerprint.hex, here)
            if not self.storage.exists(file):
                fields = {
                    "chain": here,
                    "fingerprint": self.fingerprint.hex,
                    "format": FORMAT,
                    "index": block,
                    "parent": chain.at(block),
                    "tokens": encoded_tokens(ids[block * BLOCK : (block + 1) * BLOCK]),
                }
                self.storage.put(file, sealed("node", fields))

    def _matcher(self, store: KVStore) -> Matcher:
        return Matcher(
            self.storage,
            self.fingerprint.hex,
            group_ids=[group.id for group in store.geometry.groups],
            numerics=store.numerics,
            salt=self._salt,
        )


def _after(failed: PackError | None, match: Match) -> Match:
    """The match, with the reason that a deeper cut was of no use."""
    if failed is None:
        return match
    return replace(match, reason=f"a deeper cut is damaged: {failed}")
