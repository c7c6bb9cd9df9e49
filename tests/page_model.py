"""Which pages of memory a family of sessions holds, kept apart from the store on purpose.

A page of a plane is a name. Writing rows gives a session a name of its own for every page behind
them, unless it has one that nobody else knows; forks and checkpoints learn names. What is held is
the number of names that somebody knows.
"""

from collections import Counter
from itertools import count

PAGE = 4096


class Pages:
    """All sessions of a store whose layers have one head of equal dims in float32.

    Args:
        windows: by layer; None for a full layer.
        capacities: rows of each layer's plane.
        dim: elements of a key, and of a value.
        head_major: layers that keep all keys, then all values; others keep rows whole.
    """

    def __init__(self, windows, capacities, dim, head_major):
        self.windows = windows
        self.capacities = capacities
        self.half = 4 * dim
        self.head_major = head_major
        self.names = count()
        self.sessions = {}
        self.holds = {}

    def behind(self, layer, rows):
        """The pages behind rows of a layer's plane."""
        pages = set()
        for row in rows:
            if layer in self.head_major:
                values = self.capacities[layer] * self.half
                pieces = [(row * self.half, self.half), (values + row * self.half, self.half)]
            else:
                pieces = [(2 * row * self.half, 2 * self.half)]
            for first, size in pieces:
                pages.update(range(first // PAGE, -(-(first + size) // PAGE)))
        return {(layer, page) for page in pages}

    def known(self):
        """How many know each name."""
        holders = [*self.sessions.values(), *self.holds.values()]
        return Counter(name for pages in holders for name in pages.values())

    def write(self, key, rows):
        """A session is about to write rows, by layer."""
        mine = self.sessions.setdefault(key, {})
        known = self.known()
        for layer, of_layer in rows.items():
            for page in self.behind(layer, of_layer):
                if page not in mine or known[mine[page]] > 1:
                    mine[page] = next(self.names)

    def of_rows(self, key, rows, *, full_only=False):
        """The names of a session's pages behind rows, by layer."""
        mine = self.sessions.get(key, {})
        wanted = set()
        for layer, of_layer in rows.items():
            if not (full_only and self.windows[layer] is not None):
                wanted |= self.behind(layer, of_layer)
        return {page: mine[page] for page in wanted}

    def held(self, keys):
        """Bytes that some sessions and checkpoints hold together."""
        holders = [{**self.sessions, **self.holds}.get(key, {}) for key in keys]
        return PAGE * len({name for pages in holders for name in pages.values()})
