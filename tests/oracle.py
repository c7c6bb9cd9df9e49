"""What a session must hold, kept apart from the store on purpose: dictionaries of positions.

    history    position -> token, of everything that was committed and not forgotten
    held       layer -> {position: token}, what its ring or full plane still has
    row        where a position lies: rows are taken in turn from the first one on, and a position
               keeps its row for ever

A ring of C rows that takes tokens up to `stop` overwrites everything below `stop - C`; a step that
is not kept gives back what its first position needs, which is the last W - 1 positions.
"""

from copy import copy

import tiny


class Oracle:
    """One session.

    Args:
        first: its first position.
        windows: by layer that owns rows; None for a full layer.
        capacities: rows of each layer's plane.
        first_rows: by layer, the row of the first position.
    """

    def __init__(self, first, windows, capacities, first_rows):
        self.first = first
        self.windows = windows
        self.capacities = capacities
        self.born = {layer: (first, row) for layer, row in first_rows.items()}
        self.history = {}
        self.held = {layer: {} for layer in windows}
        self.left = None
        self.highest = first

    @property
    def position(self):
        return self.first + len(self.history)

    @property
    def tokens(self):
        return [self.history[position] for position in sorted(self.history)]

    def row(self, layer, position):
        at, row = self.born[layer]
        return (row + position - at) % self.capacities[layer]

    def needed(self, layer, position):
        """The positions that a token at `position` sees beside itself."""
        window = self.windows[layer]
        return range(
            self.first if window is None else max(self.first, position - (window - 1)), position
        )

    def seen(self, layer, tokens):
        """(first position, tokens) of the view of a step."""
        old = {
            position: token
            for position, token in self.held[layer].items()
            if position in self.needed(layer, self.position)
        }
        return min(old, default=self.position), [old[at] for at in sorted(old)] + tokens

    def take(self, tokens, accepted):
        """A step of tokens of which some are kept."""
        first, stop = self.position, self.position + len(tokens)
        kept = dict(enumerate(tokens[:accepted], first))
        for layer, held in self.held.items():
            overwritten = range(stop - self.capacities[layer])
            rest = held
            if accepted < len(tokens) and self.left is None:
                needed = self.needed(layer, first)
                rest = {p: t for p, t in held.items() if p not in overwritten or p in needed}
            self._hold(layer, {**rest, **kept})
        self.history.update(kept)
        self.highest = max(self.highest, self.position)

    def _hold(self, layer, rows):
        oldest = max(rows, default=self.first) + 1 - self.capacities[layer]
        if self.left is not None and self.windows[layer] is not None:
            self.left[layer].update({p: t for p, t in rows.items() if p < oldest})
        self.held[layer] = {p: t for p, t in rows.items() if p >= oldest}

    def lost(self, layer, position):
        """The positions that a rewind needs and this layer does not hold."""
        return [p for p in self.needed(layer, position) if p not in self.held[layer]]

    def recorded(self, layer, position):
        """Whether recording promises what a rewind needs and the ring no longer holds."""
        window = self.windows[layer]
        known = self.left is not None and self.left[layer]
        return (
            bool(known)
            and self.highest - position <= window - 1
            and all(p in known for p in self.lost(layer, position))
        )

    def rewind(self, position):
        """Forget everything from a position on; put recorded rows back where they are needed."""
        for layer, held in self.held.items():
            rows = {p: t for p, t in held.items() if p < position}
            for p in self.lost(layer, position):
                rows[p] = self.left[layer].pop(p)
            if self.left is not None:
                for p in [p for p in self.left[layer] if p >= position]:
                    del self.left[layer][p]
            self.held[layer] = rows
        self.history = {p: t for p, t in self.history.items() if p < position}

    def record(self, *, on):
        self.left = {layer: {} for layer in self.windows} if on else None
        self.highest = self.position

    def reset(self):
        self.history = {}
        self.held = {layer: {} for layer in self.windows}
        self.born = {
            layer: (self.first, self.first % self.capacities[layer] if window is None else 0)
            for layer, window in self.windows.items()
        }
        self._forget_recorded()

    def _forget_recorded(self):
        if self.left is not None:
            self.record(on=True)

    def copy(self):
        """A session of the same rows that records nothing."""
        twin = copy(self)
        twin.history = dict(self.history)
        twin.held = {layer: dict(rows) for layer, rows in self.held.items()}
        twin.left = None
        return twin

    def become(self, other):
        """Hold what another state of the same session held."""
        kept = other.copy()
        self.history, self.held, self.born = kept.history, kept.held, kept.born
        self._forget_recorded()


def check(session, oracle):
    """That a session is what its oracle says, row by row."""
    assert oracle.position == session.position
    assert session.open_step is None
    if session.tokens is not None:
        assert oracle.tokens == session.tokens
    for layer, held in oracle.held.items():
        live = session.live(layer)
        plane = session.planes[layer]
        group = session.geometry.group_of(layer)

        assert sorted(held) == list(live)
        assert oracle.needed(layer, oracle.position).start >= live.start or not live
        assert [held[p] for p in live] == [oracle.history[p] for p in live]
        for position in live:
            row = oracle.row(layer, position)
            found = tiny.token_of(group, layer, plane.key[0, row], plane.value[0, row])

            assert held[position] == found
        assert [held[p] for p in live] == tiny.held(session, layer)
