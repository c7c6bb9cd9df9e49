"""Memory in which whatever nothing wrote is NaN, in every dtype a plane can have.

All bits set is a NaN in float16, bfloat16 and float32. A backend's spans are filled with it when
they are reserved and again when they are discarded, so that a row that is read without having been
written shows in the first output it reaches.
"""

from kvplane.memory import Choice, choose


class PoisonedSpan:
    """A span of another backend, filled with NaN."""

    def __init__(self, span):
        self._span = span
        self._fill()

    def _fill(self):
        self._span.back([range(self._span.nbytes)])
        self._span.tensor().fill_(0xFF)

    def discard(self):
        self._span.discard()
        self._fill()

    def share(self, source, ranges):
        return self._span.share(source._span, ranges)

    def __getattr__(self, name):
        return getattr(self._span, name)


class PoisonedArena:
    """An arena whose spans are NaN."""

    def __init__(self, arena):
        self._arena = arena

    def reserve(self, nbytes, *, ring):
        return PoisonedSpan(self._arena.reserve(nbytes, ring=ring))

    def fork(self):
        return PoisonedArena(self._arena.fork())

    def __getattr__(self, name):
        return getattr(self._arena, name)


class PoisonedBackend:
    """A backend whose memory is NaN."""

    def __init__(self, backend):
        self._backend = backend

    def arena(self):
        return PoisonedArena(self._backend.arena())

    def __getattr__(self, name):
        return getattr(self._backend, name)


def poisoned(memory, device):
    """As `kvplane.memory.choose`, but poisoned."""
    backend, why = choose(memory, device)
    return Choice(PoisonedBackend(backend), why)
