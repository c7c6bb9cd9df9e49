"""The cache that a model sees while its step is captured: it hands a token's rows straight on.

What was seen before stands in device tables; the host knows it only as numbers that no graph may
depend on. `seen` can therefore be set: a model whose output follows it cannot be captured.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvplane.errors import ArgumentError


class GraphLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # the host's is untyped
    """One layer: the rows of this call's token, and nothing older.

    Args:
        cache: whose layer it is.
        sliding_window: None for a full layer.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: "GraphCache", sliding_window: int | None) -> None:
        self._cache = cache
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: there is nothing here."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: Any,  # noqa: ANN401 - the host's signature
    ) -> tuple[Tensor, Tensor]:
        """The same rows: attention stores them and reads the others where they are."""
        del args, kwargs
        return key_states, value_states

    def get_seq_length(self) -> int:
        """What the cache says."""
        return self._cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if everything were seen: masks are not made."""
        return self._cache.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit that a graph knows."""
        return -1


class GraphCache(Cache):
    """A transformers cache for one captured call.

    Args:
        windows: of every layer; None for a full one.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.seen = 1
        super().__init__(layers=[GraphLayer(self, window) for window in windows])

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: Any,  # noqa: ANN401 - the host's signature
    ) -> tuple[Tensor, Tensor]:
        """The same rows, whichever layer's they are.

        Raises:
            ArgumentError: more than one token a sequence.
        """
        del args, kwargs
        if key_states.shape[2] != 1:
            raise ArgumentError(argument="ids", expected="one token", got=key_states.shape[2])
        return key_states, value_states
