"""Exact, portable KV caches for hybrid-attention models."""

from kvplane._version import __version__

__all__ = ["__version__"]
