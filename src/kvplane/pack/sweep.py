"""Keeping house: what nothing names goes, and under a budget the cuts that were used longest ago.

    drop cuts     only under a budget, least recently used first; never what a session names
    look          blobs that no session and no cut names, and that are old
    wait          GRACE_S: whoever is at work by now has a lease or is done
    look again    no live lease; what is still unnamed is moved aside
    look again    what was named meanwhile is moved back; the rest is deleted

A writer names blobs that it found, publishes, and then looks whether they are there. When it looked
before a blob was moved, the last look here sees what it published; when after, it puts the blob
again from its rows. A sweeper that died leaves what it moved to the next one.

One sweeper at a time. A session or cut that cannot be read may name anything: while there is one
of another format or a damaged session, no blob is deleted.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from kvplane.errors import ArgumentError, PackCorrupt, PackError, PackTooLarge, StorageMissing
from kvplane.pack.blob import blob_name
from kvplane.pack.documents import Cut, Node
from kvplane.pack.inventory import Document, Kind, blob_of, documents, kind_of
from kvplane.pack.lease import GRACE_S, LEASE_S, SKEW_S, live_leases
from kvplane.pack.limits import NODE_NBYTES
from kvplane.pack.match import node_file
from kvplane.pack.parallel import mapped
from kvplane.storage import Storage

# a writer's blob is there before anything names it
BLOB_AGE_S = LEASE_S + SKEW_S
TEMPORARY_AGE_S = 86_400
LOCK = "gc"
ASIDE = "swept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep deleted, or would.

    Args:
        cuts: dropped for the budget, or damaged.
        blobs: files that nothing named.
        nodes: index files without a cut below.
        leases: of processes that are gone.
        temporaries: how many files that dead writers left; none are counted by a dry run.
        nbytes: of all these.
        left_nbytes: of what is in the root afterwards, temporaries apart.
        young: blobs that nothing names, too new to be deleted.
        busy: live leases, for which no blob was deleted.
        unreadable: documents that may name anything, for which no blob was deleted.
    """

    cuts: tuple[str, ...] = ()
    blobs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()
    temporaries: int = 0
    nbytes: int = 0
    left_nbytes: int = 0
    young: int = 0
    busy: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


class _Marks:
    """Who names what, at one look."""

    def __init__(self, found: Iterable[Document]) -> None:
        self.sessions: set[str] = set()
        self.cuts: dict[str, frozenset[str]] = {}
        self.chains: dict[str, tuple[str, str]] = {}
        self.damaged: list[str] = []
        self.unreadable: list[str] = []
        for one in found:
            if one.content is not None:
                blobs = frozenset(one.content.state.blobs)
                if not isinstance(one.content, Cut):
                    self.sessions |= blobs
                else:
                    self.cuts[one.file] = blobs
                    self.chains[one.file] = one.content.state.fingerprint, one.content.chain
            elif isinstance(one.error, StorageMissing):
                # deleted since it was listed
                continue
            elif one.kind is Kind.CUT and isinstance(one.error, PackCorrupt | PackTooLarge):
                # a cut is what its name says or nothing
                self.damaged.append(one.file)
            else:
                self.unreadable.append(one.file)

    @property
    def blobs(self) -> set[str]:
        """All that are named."""
        return self.sessions.union(*self.cuts.values())


def sweep(
    storage: Storage,
    *,
    budget_nbytes: int | None = None,
    dry_run: bool = False,
    age_s: float = BLOB_AGE_S,
    clock: Callable[[], float] = time.time,
    wait: Callable[[float], object] = time.sleep,
) -> Swept:
    """Delete what nothing needs.

    Args:
        storage: an opened root.
        budget_nbytes: drop cuts until the root is no larger; None drops none.
        dry_run: delete nothing, and say what would be.
        age_s: blobs that are newer are kept: somebody may be about to name them.
        clock: seconds since 1970, as `storage.modified` has them.
        wait: for so many seconds, between the two looks.

    Raises:
        SessionLocked: another process sweeps this root.
        ArgumentError: a budget or an age below zero.
        StorageError: something could not be read or deleted; what was deleted was not needed.
    """
    for argument, value in (("budget_nbytes", budget_nbytes), ("age_s", age_s)):
        if value is not None and value < 0:
            raise ArgumentError(argument=argument, expected="at least 0", got=value)
    if dry_run:
        return _Sweep(storage, budget_nbytes, age_s, clock).run(None)
    with storage.lock(LOCK):
        put_back(storage)
        return _Sweep(storage, budget_nbytes, age_s, clock).run(wait)


class _Sweep:
    def __init__(
        self, storage: Storage, budget: int | None, age_s: float, clock: Callable[[], float]
    ) -> None:
        self._storage = storage
        self._budget = budget
        self._age_s = age_s
        self._clock = clock
        self._sizes = dict(_sizes(storage))

    def _take(self, files: list[str]) -> list[str]:
        """The files that are gone now: those that nobody named until they were moved aside."""
        moved: list[str] = []
        gone: list[str] = []
        try:
            for file in files:
                with suppress(StorageMissing):
                    self._storage.move(file, _aside(file))
                    moved.append(file)
            if moved:
                marks = _Marks(documents(self._storage))
                named = marks.blobs
                gone = [
                    file for file in moved if blob_of(file) not in named and not marks.unreadable
                ]
        finally:
            for file in set(moved) - set(gone):
                with suppress(StorageMissing):
                    self._storage.move(_aside(file), file)
        self._delete(map(_aside, gone))
        return gone

    def run(self, wait: Callable[[float], object] | None) -> Swept:
        """All steps; without `wait` nothing is deleted."""
        marks = _Marks(documents(self._storage))
        dropped = self._dropped(marks)
        if wait is not None:
            self._delete(dropped)
        for file in dropped:
            marks.cuts.pop(file, None)
        old, young = self._unnamed(marks)
        busy: list[str] = []
        unreadable = marks.unreadable
        if old and wait is not None and not unreadable:
            wait(GRACE_S)
            busy = live_leases(self._storage, now=self._clock())
            again = _Marks(documents(self._storage))
            unreadable = again.unreadable
            named = again.blobs
            old = [file for file in old if blob_of(file) not in named]
        elif wait is None:
            busy = live_leases(self._storage, now=self._clock())
        if busy or unreadable:
            old = []
        nodes = self._nodes(marks) if dropped else []
        leases = self._expired()
        temporaries = 0
        if wait is not None:
            before = self._clock() - TEMPORARY_AGE_S
            temporaries = self._storage.clear_temporaries(before=before)
            old = self._take(old)
            self._delete(nodes)
            self._delete(leases)
        gone = [*dropped, *old, *nodes, *leases]
        nbytes = sum(self._sizes.get(file, 0) for file in gone)
        return Swept(
            cuts=tuple(dropped),
            blobs=tuple(old),
            nodes=tuple(nodes),
            leases=tuple(leases),
            temporaries=temporaries,
            nbytes=nbytes,
            left_nbytes=sum(self._sizes.values()) - nbytes,
            young=young,
            busy=tuple(busy),
            unreadable=tuple(unreadable),
        )

    def _dropped(self, marks: _Marks) -> list[str]:
        """Damaged cuts, and those that the budget has no room for, oldest use first."""
        dropped = list(marks.damaged)
        if self._budget is None:
            return dropped
        # what will be there once every blob that nothing names is gone
        users = Counter(blob for blobs in marks.cuts.values() for blob in blobs)
        users.update(marks.sessions)
        sizes = {
            blob_of(file): size for file, size in self._sizes.items() if kind_of(file) is Kind.BLOB
        }
        left = sum(self._sizes.values()) - sum(self._sizes.get(file, 0) for file in dropped)
        left -= sum(size for blob, size in sizes.items() if blob not in users)
        used = mapped(self._storage, self._modified, marks.cuts)
        for _, file in sorted(zip(used, marks.cuts, strict=True)):
            if left <= self._budget:
                break
            dropped.append(file)
            left -= self._sizes.get(file, 0)
            for blob in marks.cuts[file]:
                users[blob] -= 1
                if not users[blob]:
                    left -= sizes.get(blob, 0)
        return dropped

    def _unnamed(self, marks: _Marks) -> tuple[list[str], int]:
        """Old blobs that nothing names, and how many younger ones there are."""
        named = marks.blobs
        files = [
            file
            for file in self._sizes
            if kind_of(file) is Kind.BLOB and blob_of(file) not in named
        ]
        before = self._clock() - self._age_s
        times = mapped(self._storage, self._modified, files)
        old = [file for file, at in zip(files, times, strict=True) if at < before]
        return old, len(files) - len(old)

    def _nodes(self, marks: _Marks) -> list[str]:
        """Index files that lead to no cut."""
        parents: dict[tuple[str, str], str] = {}
        files = [file for file in self._sizes if kind_of(file) is Kind.NODE]
        for file in files:
            try:
                node = Node.decoded(self._storage.read(file, limit=NODE_NBYTES), file)
            except PackError:
                # a bad one says nothing
                continue
            if node_file(node.fingerprint, node.chain) == file:
                parents[node.fingerprint, node.chain] = node.parent
        needed: set[str] = set()
        for file in marks.cuts:
            fingerprint, at = marks.chains[file]
            while (fingerprint, at) in parents and node_file(fingerprint, at) not in needed:
                needed.add(node_file(fingerprint, at))
                at = parents[fingerprint, at]
        return [file for file in files if file not in needed]

    def _expired(self) -> list[str]:
        live = set(live_leases(self._storage, now=self._clock()))
        return [file for file in self._sizes if kind_of(file) is Kind.LEASE and file not in live]

    def _modified(self, file: str) -> float:
        try:
            return self._storage.modified(file)
        except StorageMissing:
            return self._clock()

    def _delete(self, files: Iterable[str]) -> None:
        for file in files:
            self._storage.delete(file)


def put_back(storage: Storage) -> None:
    """Undo what a sweeper that died had begun: it is looked at like everything else."""
    for file in storage.list(ASIDE):
        name = blob_name(blob_of(file))
        if kind_of(name) is Kind.BLOB:
            storage.move(file, name)


def _aside(file: str) -> str:
    return f"{ASIDE}/{blob_of(file)}.safetensors"


def _sizes(storage: Storage) -> Iterable[tuple[str, int]]:
    def size(file: str) -> int | None:
        with suppress(StorageMissing):
            return storage.size(file)
        # removed since it was listed
        return None

    files = storage.list()
    for file, nbytes in zip(files, mapped(storage, size, files), strict=True):
        if nbytes is not None:
            yield file, nbytes
