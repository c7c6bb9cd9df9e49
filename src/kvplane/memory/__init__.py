"""Where planes live: one folder door, one file a backend."""

from kvplane.memory.base import Arena, Backend, Hold, Span
from kvplane.memory.choose import Choice, choose

__all__ = ["Arena", "Backend", "Choice", "Hold", "Span", "choose"]
