"""One model layer as transformers sees it: a `CacheLayerMixin` that owns nothing.

Every layer of a cache forwards to the one step that the cache keeps open for all of them.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvplane.errors import ArgumentError

if TYPE_CHECKING:
    from kvplane.integrations.transformers.host import HostCache


class StoreLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # the host's is untyped
    """Keys and values of one layer, held by the cache's session.

    Args:
        cache: whose layer it is.
        layer: the model's 0-based index.
        sliding_window: None for a full layer.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "HostCache", layer: int, sliding_window: int | None) -> None:
        self._cache = cache
        self._layer = layer
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def is_initialized(self) -> bool:
        """Whether there is anything to read."""
        return self._cache.seen > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """Set by the base class; the session decides."""

    @property
    def record_past(self) -> bool:
        """Whether overwritten rows are kept for `crop`."""
        return self._cache.is_recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._cache.record(on=bool(value))

    def activate_past_recording(self) -> None:
        """Keep overwritten rows, for `crop`."""
        self._cache.record(on=True)

    @property
    def keys(self) -> Tensor | None:
        """The live keys, [batch, kv_heads, rows, head_dim], in logical order; a view or a copy."""
        return self._cache.rows(self._layer)[0]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        """Set by the base class; rows are only written by `update`."""

    @property
    def values(self) -> Tensor | None:
        """The live values, as `keys`."""
        return self._cache.rows(self._layer)[1]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        """Set by the base class; rows are only written by `update`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first update opens the session."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: Any,  # noqa: ANN401 - the host's signature
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's rows and return what its queries see, [batch, kv_heads, rows, dim]."""
        del args
        facts = kwargs.get("kwargs") or kwargs
        return self._cache.write(
            self._layer, key_states, value_states, position_ids=facts.get("position_ids")
        )

    def get_seq_length(self) -> int:
        """Tokens seen, not rows held."""
        return self._cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows that `update` will return, and the position of the first."""
        seen = self._cache.seen
        if self.sliding_window is None:
            return seen + query_length, 0
        held = min(seen, self.sliding_window - 1)
        return held + query_length, seen - held

    def get_max_length(self) -> int:
        """-1: rows are taken as tokens come, up to the store's max_context."""
        return -1 if self.sliding_window is None else self.sliding_window

    # a layer alone must not: the cache does these for all its layers, or for none

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: the cache's own."""
        self._together("crop", tokens_to_remove)

    def reset(self) -> None:
        """Refused: the cache's own."""
        self._together("reset", None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: the cache's own."""
        self._together("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the cache's own."""
        self._together("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused: the cache's own."""
        self._together("batch_select_indices", indices)

    def offload(self) -> None:
        """Refused: rows stay where the store keeps them."""
        self._together("offload", None)

    def prefetch(self) -> None:
        """Refused: rows stay where the store keeps them."""
        self._together("prefetch", None)

    def _together(self, what: str, got: object) -> None:
        raise ArgumentError(
            argument="layer", expected=f"the cache's {what}: layers change together", got=got
        )
