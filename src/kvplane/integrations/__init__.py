"""Doors to other people's engines; each imports its host lazily."""
