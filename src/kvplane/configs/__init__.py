"""Reading model configurations: one `Fields` for objects and dicts, a module a question."""

from kvplane.configs.layers import ROWLESS, read

__all__ = ["ROWLESS", "read"]
