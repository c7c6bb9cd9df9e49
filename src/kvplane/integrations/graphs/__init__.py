"""A whole decode step of an unmodified transformers model as one CUDA graph.

    graph = DecodeGraph(model, cache)
    logits = graph.step(ids)            # one launch; the cache holds the token

The first step captures; later ones replay, while planes grow, after rewinds, for forks and restored
sessions of the same shape.
"""

from kvplane.integrations.graphs.decode import DecodeGraph

__all__ = ["DecodeGraph"]
