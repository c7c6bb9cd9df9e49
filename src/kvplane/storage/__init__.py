"""Where a pack's files live: one folder door, one file a kind of storage."""

from kvplane.storage.base import Data, Lock, Reading, Storage, check_name
from kvplane.storage.choose import open_storage
from kvplane.storage.local import LocalStorage
from kvplane.storage.memory import MemoryStorage

__all__ = [
    "Data",
    "LocalStorage",
    "Lock",
    "MemoryStorage",
    "Reading",
    "Storage",
    "check_name",
    "open_storage",
]
