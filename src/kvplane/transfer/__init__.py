"""A session on its way to another machine: prefill on one, decode on another.

    link = connect("decode.example:7700", identity=identity)      prefill machine
    send(session, link, position=len(prompt) - 1)

    with Listener("0.0.0.0:7700", identity=identity) as listener:  decode machine
        received = receive(store, listener.accept())

Nothing is visible in the receiver's store before every row is there and verified.
"""

from kvplane.transfer.errors import (
    LinkLost,
    LinkTimeout,
    TransferAborted,
    TransferCorrupt,
    TransferIncomplete,
    TransferRefused,
    TransferTooLarge,
    TransferUnconfirmed,
    TransferVersion,
)
from kvplane.transfer.links import Identity, Link, Listener, connect, memory_links
from kvplane.transfer.receiver import Pending, Received, receive
from kvplane.transfer.schedule import CHAPTER, STREAMED, Schedule, Segment
from kvplane.transfer.sender import Sent, plan_of, send
from kvplane.transfer.streaming import Streaming

__all__ = [
    "CHAPTER",
    "STREAMED",
    "Identity",
    "Link",
    "LinkLost",
    "LinkTimeout",
    "Listener",
    "Pending",
    "Received",
    "Schedule",
    "Segment",
    "Sent",
    "Streaming",
    "TransferAborted",
    "TransferCorrupt",
    "TransferIncomplete",
    "TransferRefused",
    "TransferTooLarge",
    "TransferUnconfirmed",
    "TransferVersion",
    "connect",
    "memory_links",
    "plan_of",
    "receive",
    "send",
]
