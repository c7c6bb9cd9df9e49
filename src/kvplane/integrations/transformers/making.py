"""The store behind a cache: made once a key has shown its dtype and device."""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from kvplane.errors import ArgumentError
from kvplane.geometry import LayerGroup
from kvplane.integrations.transformers import attention, kinds
from kvplane.integrations.transformers.options import (
    DEFAULT_KERNEL,
    Options,
    context_of,
    numerics_of,
)
from kvplane.store import KVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """A model's text config, its layers, and what was asked for.

    Args:
        config: transformers'.
        kinds: of every layer.
        options: of the cache.
    """

    config: Any
    kinds: tuple[kinds.LayerKind, ...]
    options: Options

    @classmethod
    def of(cls, config: Any, **options: Any) -> Self:  # noqa: ANN401 - any transformers config
        """For a text config; a max_context of None takes the config's.

        Raises:
            GeometryError: a model or a kind of layer that no store holds.
            ArgumentError: an option that means nothing.
        """
        if options["max_context"] is None:
            options["max_context"] = context_of(config)
        return cls(config=config, kinds=kinds.kinds_of(config), options=Options(**options))

    @property
    def asked(self) -> dict[str, Any]:
        """The options, for another cache like this one."""
        return {field.name: getattr(self.options, field.name) for field in fields(self.options)}

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups; their dtype is not the rows'."""
        return kinds.geometry_of(self.config, self.kinds, "float32").groups

    @property
    def kernel(self) -> str | None:
        """The model's attention implementation, where it is said."""
        return getattr(self.config, "_attn_implementation", None)

    def store(self, dtype: torch.dtype, device: torch.device | str) -> KVStore:
        """A store for the model's rows."""
        name = str(dtype).removeprefix("torch.")
        store = KVStore(
            kinds.geometry_of(self.config, self.kinds, name),
            max_context=self.options.max_context,
            device=device,
            memory=self.options.memory,
            attention=self.options.order,
            slack=self.options.slack,
            limit=self.options.limit,
        )
        store.numerics = numerics_of(self.options, store.numerics, self.kernel)
        return store

    def follow_kernel(self, store: KVStore | None) -> None:
        """See that the attention in use is the one that was asked for, and is in the numerics.

        Raises:
            ArgumentError: the store's order was asked for, and the model uses another.
        """
        kernel = self.kernel
        if self.options.in_store_order:
            if kernel != attention.NAME:
                expected = f'model.set_attn_implementation("{attention.NAME}")'
                raise ArgumentError(argument="attention", expected=expected, got=kernel)
        elif store is not None and store.numerics["kernel"] != (kernel or DEFAULT_KERNEL):
            store.numerics = store.numerics | {"kernel": kernel or DEFAULT_KERNEL}
