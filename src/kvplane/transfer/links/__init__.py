"""Connections that carry a handoff."""

from kvplane.transfer.links.addresses import Address, Listener, connect
from kvplane.transfer.links.base import Link
from kvplane.transfer.links.identity import Identity
from kvplane.transfer.links.memory import MemoryLink, memory_links
from kvplane.transfer.links.sockets import SocketLink, TlsLink

__all__ = [
    "Address",
    "Identity",
    "Link",
    "Listener",
    "MemoryLink",
    "SocketLink",
    "TlsLink",
    "connect",
    "memory_links",
]
