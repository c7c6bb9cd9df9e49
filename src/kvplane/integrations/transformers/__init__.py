"""A transformers cache on the store."""

from kvplane.integrations.transformers.cache import HybridCache
from kvplane.integrations.transformers.calls import prefill
from kvplane.integrations.transformers.saving import Origin

__all__ = ["HybridCache", "Origin", "prefill"]
