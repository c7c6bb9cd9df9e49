"""Where a pack's files live: one folder door, one file a kind of storage."""

from kvplane.storage.base import Data, Lock, Storage, check_name

__all__ = ["Data", "Lock", "Storage", "check_name"]
