"""Attention over planes: one file an order of summation."""
