"""Geometries whose bytes are easily counted by hand."""

from kvplane.geometry import FULL, SLIDING, ModelGeometry


def small(window=8, *, row=16, num_sliding=1, **facts):
    """A geometry whose rows take `row` bytes, with one full layer after the sliding ones."""
    facts = {"num_kv_heads": 1, "head_dim": row // 4, "dtype": "float16"} | facts
    return ModelGeometry.uniform([SLIDING] * num_sliding + [FULL], sliding_window=window, **facts)
