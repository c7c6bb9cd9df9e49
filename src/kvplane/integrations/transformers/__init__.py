"""A transformers cache on the store."""

from kvplane.integrations.transformers.cache import HybridCache

__all__ = ["HybridCache"]
