"""A prompt for whoever prefills: the one frame that a receiver says before a handoff begins.

The link then carries the handoff the other way: whoever asked receives.
"""

from collections.abc import Sequence

import numpy as np

from kvplane.pack.chain import packed_ids
from kvplane.transfer.clock import Clock
from kvplane.transfer.errors import TransferCorrupt
from kvplane.transfer.frames import FrameReader, Header, Kind, Place, fresh, sealed
from kvplane.transfer.links.base import Link
from kvplane.transfer.opening import ID_NBYTES
from kvplane.transfer.words import FIRST_KEY, abort


def ask(link: Link, ids: Sequence[int], clock: Clock) -> None:
    """Send a prompt: ArgumentError for ids outside 32 bits, LinkLost, LinkTimeout."""
    link.write([sealed(FIRST_KEY, Kind.REQUEST, packed_ids(ids))], clock)


def asked(link: Link, clock: Clock, *, max_tokens: int) -> list[int]:
    """The prompt that somebody sends.

    Args:
        link: to whoever asks.
        clock: running.
        max_tokens: no memory is taken for more.

    Raises:
        TransferCorrupt, TransferVersion, TransferTooLarge, LinkLost, LinkTimeout: none came.
    """

    def place(header: Header) -> Place:
        if header.kind is not Kind.REQUEST or header.number or header.nbytes % ID_NBYTES:
            raise TransferCorrupt(what=f"{header.kind.name} came where a request is due")
        return fresh(header, limit=ID_NBYTES * max_tokens)

    frames = FrameReader(place)
    while (frame := frames.advance(link.read_into(frames.buffers(), clock))) is None:
        continue
    frame.check(FIRST_KEY)
    ids: list[int] = np.frombuffer(frame.data(), "<u4").tolist()
    return ids


def decline(link: Link, reason: str, *, linger_s: float = 1.0) -> None:
    """Tell whoever asked why there will be no handoff, if it still listens."""
    link.write([sealed(FIRST_KEY, Kind.ABORT, abort(reason))], Clock(linger_s, linger_s))
    link.finish(linger_s=linger_s)
