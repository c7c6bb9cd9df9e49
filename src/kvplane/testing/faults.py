"""A folder whose system calls fail, shorten or kill the process, at a place that the test names.

    for fault in each_fault(lambda system: save(new_root(), system)):
        root = new_root()
        outcome = attempt(lambda system: save(root, system), fault)
        ...the old session or the new one, never a mixture

`Killed` is no Exception: nothing that handles errors sees it, and afterwards the system executes
nothing more, as it would for a process that is gone.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kvplane.errors import PackError
from kvplane.storage.system import System

T = TypeVar("T")

_OPENS = frozenset({"open_root", "open_folder", "open_read", "open_new", "open_lock"})
_WRITES = frozenset({"open_new", "open_lock", "make_folder", "write", "sync", "link", "rename"})
_MOVES = frozenset({"read", "write"})
_CALLS = frozenset(name for name in vars(System) if not name.startswith("_"))


class Kind(Enum):
    """What goes wrong."""

    DISK_FULL = "disk full"
    IO_ERROR = "I/O error"
    INTERRUPTED = "interrupted"
    DENIED = "permission denied"
    SHORT = "short"
    KILL = "kill"

    @property
    def calls(self) -> frozenset[str]:
        """The calls that it can happen to."""
        return _CAN_HAPPEN[self]


_CAN_HAPPEN = {
    Kind.DISK_FULL: _WRITES,
    Kind.IO_ERROR: _CALLS,
    Kind.INTERRUPTED: _OPENS | _MOVES | {"sync", "lock"},
    Kind.DENIED: _CALLS - _MOVES - {"close", "sync", "stat_open", "truncate", "lock", "unlock"},
    Kind.SHORT: _MOVES,
    # a process that dies closes its files by that
    Kind.KILL: _CALLS - {"close"},
}
_CODES = {
    Kind.DISK_FULL: errno.ENOSPC,
    Kind.IO_ERROR: errno.EIO,
    Kind.INTERRUPTED: errno.EINTR,
    Kind.DENIED: errno.EACCES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong at the n-th system call, from 1; `lasting`: from there on."""

    kind: Kind
    number: int
    lasting: bool = False

    def hits(self, number: int, call: str) -> bool:
        """Whether this call is one that it happens to."""
        reached = number >= self.number if self.lasting else number == self.number
        return reached and call in self.kind.calls


class Killed(BaseException):
    """The process died here."""


class FaultySystem(System):
    """System calls with one fault among them; without one it counts."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.calls: list[str] = []
        self.dead = False
        self.open_files: set[int] = set()
        self._guard = threading.Lock()

    def reach(self, call: str) -> Kind | None:
        """What goes wrong with this call, which is counted.

        Raises:
            Killed: it is the one, or the process is gone already.
            OSError: as the system would.
        """
        with self._guard:
            if self.dead:
                raise Killed
            self.calls.append(call)
            fault = self.fault
            if fault is None or not fault.hits(len(self.calls), call):
                return None
            # of a write, death leaves half
            if fault.kind is Kind.SHORT or (fault.kind is Kind.KILL and call == "write"):
                return fault.kind
            if fault.kind is Kind.KILL:
                self.die()
            code = _CODES[fault.kind]
            raise OSError(code, os.strerror(code))

    def die(self) -> None:
        """End as a killed process does: its files are closed, and nothing more is executed.

        Raises:
            Killed: always.
        """
        self.dead = True
        while self.open_files:
            os.close(self.open_files.pop())
        raise Killed

    def close(self, file: int) -> None:
        """See System.close; the descriptor is given back even where an error is reported."""
        if self.dead:
            return
        self.open_files.discard(file)
        super().close(file)
        self.reach("close")

    def sync(self, file: int) -> None:  # noqa: ARG002
        """Counted, not done: it takes most of the time, and no process could see a difference."""
        self.reach("sync")

    def read(self, file: int, buffer: memoryview, first: int) -> int:
        """See System.read; a short one gives half."""
        if self.reach("read") is Kind.SHORT:
            buffer = buffer[: -(-len(buffer) // 2)]
        return super().read(file, buffer, first)

    def write(self, file: int, data: memoryview, first: int) -> int:
        """See System.write; a short one takes half."""
        kind = self.reach("write")
        if kind is not None:
            data = data[: -(-len(data) // 2)]
        count = super().write(file, data, first)
        if kind is Kind.KILL:
            self.die()
        return count


def _faulty(call: str) -> Callable[..., object]:
    real = getattr(System, call)

    def at_call(self: FaultySystem, *args: object) -> object:
        self.reach(call)
        result = real(self, *args)
        if call in _OPENS:
            self.open_files.add(result)
        return result

    return at_call


for _call in _CALLS - {"close", "sync", "read", "write"}:
    setattr(FaultySystem, _call, _faulty(_call))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """How an action ended: with a value, with a typed error, or by death."""

    value: T | None = None
    error: PackError | Killed | None = None
    system: FaultySystem

    @property
    def killed(self) -> bool:
        """Whether it died."""
        return isinstance(self.error, Killed)


def attempt(action: Callable[[FaultySystem], T], fault: Fault | None = None) -> Outcome[T]:
    """How `action` ends on a system with `fault` in it.

    Raises:
        AssertionError: it left files open.
        Exception: anything it raised that is no PackError, which nothing here may.
    """
    system = FaultySystem(fault)
    try:
        outcome = Outcome(value=action(system), system=system)
    except (PackError, Killed) as error:
        outcome = Outcome(error=error, system=system)
    assert not system.open_files, f"{len(system.open_files)} files left open after {fault}"
    return outcome


def count_calls(action: Callable[[FaultySystem], object]) -> int:
    """How many system calls `action` makes when nothing goes wrong."""
    return len(_recorded(action))


def each_fault(
    action: Callable[[FaultySystem], object], *, kinds: Sequence[Kind] = tuple(Kind)
) -> Iterator[Fault]:
    """Every fault that can happen to `action`, which is run once here, with none.

    Each of `kinds` at each call that it can happen to, this once and from there on.
    """
    for number, call in enumerate(_recorded(action), 1):
        for kind in kinds:
            if call in kind.calls:
                yield Fault(kind=kind, number=number)
                if kind is not Kind.KILL:
                    yield Fault(kind=kind, number=number, lasting=True)


def _recorded(action: Callable[[FaultySystem], object]) -> list[str]:
    system = FaultySystem()
    action(system)
    return system.calls
