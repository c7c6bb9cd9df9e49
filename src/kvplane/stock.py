"""What transformers' own caches take for the same model, as arithmetic; no tensors.

Counted as storage, since that is what is held: a view keeps the whole tensor it is a slice of. The
model's own activations are not counted.

    DynamicCache    a full layer grows by concatenation: its old keys live until the new ones are
                    made. A sliding layer keeps a view of the last window: after a prompt in one
                    piece, of the whole prompt, until the next token makes a smaller tensor.
    StaticCache     everything from the first token on; a full sliding layer is rolled by a copy.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvplane.errors import ArgumentError
from kvplane.geometry import LayerGroup, ModelGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Bytes of one session in a stock cache.

    Args:
        held: between steps, when the last tokens came one by one.
        after_prompt: when all tokens were one prompt, until the next token.
        peak: the most at any instant of either.
    """

    held: int
    after_prompt: int
    peak: int

    def __mul__(self, count: int) -> "Stock":
        return Stock(**{name: count * value for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class _Update:
    """One layer's update: rows of its tensors before and after."""

    group: LayerGroup
    rows_before: int
    rows_after: int

    @property
    def before(self) -> int:
        return self.rows_before * self.group.row_nbytes

    @property
    def after(self) -> int:
        return self.rows_after * self.group.row_nbytes

    @property
    def during(self) -> int:
        """Bytes of old and new tensors at their most."""
        if self.group.is_sliding:
            return self.before + self.after
        element = self.group.num_kv_heads * self.group.itemsize
        key, value = element * self.group.head_dim, element * self.group.value_head_dim
        # first the keys are made anew; then, the old keys gone, the values
        return max(self.before + self.rows_after * key, self.after + self.rows_before * value)


def dynamic_cache(geometry: ModelGeometry, *, context: int) -> Stock:
    """A DynamicCache that has taken `context` tokens: ArgumentError when there are none."""
    _check("context", context, 1)
    prompt, next_token = [], []
    for group in _groups_by_layer(geometry):
        window = context if group.sliding_window is None else group.sliding_window
        prompt.append(_Update(group, 0, context))
        # with a prompt of all tokens but one before it; after single ones it takes less
        next_token.append(_Update(group, context - 1, min(context, window)))
    return Stock(
        held=sum(update.after for update in next_token),
        after_prompt=sum(update.after for update in prompt),
        peak=max(_peak(prompt), _peak(next_token)),
    )


def static_cache(geometry: ModelGeometry, *, context: int, max_context: int) -> Stock:
    """A StaticCache made for `max_context` tokens that has taken `context`: ArgumentError."""
    _check("context", context, 1)
    _check("max_context", max_context, context)
    held = rolled = 0
    for group in _groups_by_layer(geometry):
        window = max_context if group.sliding_window is None else group.sliding_window
        nbytes = min(window, max_context) * group.row_nbytes
        held += nbytes
        if context > window:
            rolled = max(rolled, nbytes)
    return Stock(held=held, after_prompt=held, peak=held + rolled)


def _groups_by_layer(geometry: ModelGeometry) -> list[LayerGroup]:
    return [geometry.group_of(layer) for layer, its in enumerate(geometry.layers) if its.owns_rows]


def _peak(updates: Sequence[_Update]) -> int:
    """The most bytes while layers are updated one after the other."""
    alive = most = sum(update.before for update in updates)
    for update in updates:
        most = max(most, alive - update.before + update.during)
        alive += update.after - update.before
    return most


def _check(argument: str, number: object, least: int) -> None:
    if type(number) is not int or number < least:
        raise ArgumentError(argument=argument, expected=f"at least {least}", got=number)
