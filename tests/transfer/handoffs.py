"""Both ends of a handoff in one process, and what came of each."""

import threading
from typing import NamedTuple

import torch

from kvplane.transfer import memory_links, receive, send

QUICK = {"timeout_s": 20, "idle_timeout_s": 10}


class Ends(NamedTuple):
    """What each side returned, or raised."""

    sent: object
    received: object


def both(sending, receiving):
    """Run the two sides, each in a thread of its own; a failure is a result too."""
    found = {}

    def run(name, call):
        try:
            found[name] = call()
        except Exception as error:  # noqa: BLE001 - it is looked at by the test
            found[name] = error

    threads = [
        threading.Thread(target=run, args=(name, call))
        for name, call in (("sent", sending), ("received", receiving))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return Ends(found["sent"], found["received"])


def handoff(session, store, *, links=None, sender=None, receiver=None):
    """Move a session into a store; options of `send` and of `receive`."""
    near, far = links or memory_links()
    return both(
        lambda: send(session, near, **QUICK | (sender or {})),
        lambda: receive(store, far, **QUICK | (receiver or {})),
    )


def moved(session, store, **options):
    """The session that a store has after a handoff that must not fail."""
    ends = handoff(session, store, **options)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return ends.received


def recorded(session, store, **sender):
    """The bytes that a sender says in a handoff, whose nonces are zero."""
    near, far = memory_links(capacity=1 << 24)
    said = bytearray()
    write = near.write

    def noted(parts, clock):
        said.extend(b"".join(parts))
        write(parts, clock)

    near.write = noted
    moved(session, store, links=(near, far), sender=sender).session.close()
    return bytes(said)


def rows_of(session):
    """Every live row by layer, `[rows, kv_heads, dim]`, key and value."""
    found = {}
    for group in session.groups:
        for layer in group.layers:
            live = session.live(layer)
            spans = session.spans(layer, live.start, live.stop)
            found[layer] = tuple(torch.cat(parts) for parts in zip(*spans, strict=True))
    return found
