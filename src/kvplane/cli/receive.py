"""`kvplane receive`: a session from another machine, saved under a name."""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from kvplane.cli.links import identity_of, rate, shown
from kvplane.cli.memory import check_memory
from kvplane.cli.output import both
from kvplane.home import home

if TYPE_CHECKING:
    from kvplane.session import Session
    from kvplane.storage import Storage
    from kvplane.store import KVStore
    from kvplane.transfer import Listener
    from kvplane.transfer.links import SocketLink


def receive(
    *,
    listen: str,
    session: str,
    model: str = "glimmer-nano",
    dtype: str | None = None,
    device: str = "cpu",
    max_context: int | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    wait: float = 600.0,
    timeout: float = 600.0,
    idle_timeout: float = 30.0,
) -> None:
    """Wait for one session from `kvplane send` and save it; `kvplane run --session` goes on.

    When a connection is lost, what has come is kept, and the same `kvplane send` sends the rest.

    Example: kvplane receive --listen 127.0.0.1:7700 --session notes

    Args:
        listen: host:port (port 0 takes a free one), or unix: and a path.
        session: Name to save it under. A session of that name is replaced, and what it has in
            common with the one that comes is not sent again.
        model: glimmer-nano (shipped), a folder, or an id: whose rows are taken, and no others.
        dtype: float32, bfloat16 or float16; the model's own unless given.
        device: cpu, cuda, ...
        max_context: Positions end below it; the model's own unless given.
        certificate: PEM file, for TLS.
        key: PEM file of its private key.
        authority: PEM file of whom a sender's certificate must be from.
        insecure: Take plain bytes from other machines.
        wait: Seconds until somebody must have come.
        timeout: Seconds, of the whole handoff.
        idle_timeout: Seconds, of a wait in which nothing comes.
    """
    from kvplane.integrations.transformers import loading  # noqa: PLC0415 - torch, seconds
    from kvplane.integrations.transformers.conversation import converse  # noqa: PLC0415
    from kvplane.pack import check_session_name, open_root, save_session  # noqa: PLC0415
    from kvplane.transfer import LinkLost, LinkTimeout, Listener, Pending  # noqa: PLC0415
    from kvplane.transfer import receive as receive_session  # noqa: PLC0415

    identity = identity_of(certificate, key, authority)
    config = loading.config_of(model)
    loading.check_hybrid(config, model)
    check_memory(config, dtype=dtype, device=device, max_context=max_context)
    storage = open_root(home(), create=True)
    notes = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as last:
        last.enter_context(storage.lock(check_session_name(session)))
        named = loading.load_model(model, dtype=dtype, device=device)
        cache = converse(named, max_context=max_context).cache
        store = cache.made_store(named.model.dtype, named.model.device)
        last.callback(store.close)
        held = _held(storage, session, store)
        listener = last.enter_context(Listener(listen, identity=identity, insecure=insecure))
        notes.print(f"listening on {listener.address}", soft_wrap=True)
        until = time.monotonic() + wait
        pending = last.enter_context(Pending())
        received = None
        while received is None:
            link = accepted(listener, notes, wait_s=max(0.0, until - time.monotonic()))
            try:
                with contextlib.closing(link), shown(notes, "receiving") as progress:
                    received = receive_session(
                        store,
                        link,
                        fingerprint=named.fingerprint,
                        held=held,
                        pending=pending,
                        timeout_s=timeout,
                        idle_timeout_s=idle_timeout,
                        progress=progress,
                    )
            except (LinkLost, LinkTimeout) as error:
                kept = f"{pending.num_segments:,} segments are kept for the next try"
                notes.print(f"lost: {error}; {kept}", soft_wrap=True)
        save_session(
            storage, session, received.session, named.fingerprint, tokenizer=named.words.name
        )
        why = f" ({received.reason})" if received.reason else ""
        notes.print(
            f"saved session {session}: {received.tokens:,} tokens, {received.cut:,} of which were "
            f"here{why}",
            soft_wrap=True,
        )
        notes.print(
            f"{both(received.nbytes, notes)} in {received.num_segments:,} segments, "
            f"{received.resumed:,} of them before a connection was lost, "
            f"{received.seconds:.2f} s, {rate(received.nbytes, received.seconds)}",
            soft_wrap=True,
        )
        if not received.same_numerics:
            notes.print("its rows were made by other numerics: bits may differ from here on")
        if not received.acknowledged:
            notes.print("the sender did not hear that it is here")


def accepted(listener: "Listener", notes: Console, *, wait_s: float) -> "SocketLink":
    """The first connection that is let in; others are noted.

    Raises:
        LinkTimeout: nobody came in time.
    """
    from kvplane.transfer import LinkLost, LinkTimeout  # noqa: PLC0415

    until = time.monotonic() + wait_s
    while True:
        left = max(0.001, until - time.monotonic())
        try:
            return listener.accept(timeout_s=left)
        except (LinkLost, LinkTimeout) as error:
            if time.monotonic() >= until:
                raise
            notes.print(f"refused: {error}", soft_wrap=True)


def _held(storage: "Storage", name: str, store: "KVStore") -> "list[Session]":
    """The session of that name, if it can be of use."""
    from kvplane.errors import PackError, SnapshotMismatch  # noqa: PLC0415
    from kvplane.pack import load_session, session_names  # noqa: PLC0415

    if name not in session_names(storage):
        return []
    try:
        return [load_session(storage, name, store)[1].session]
    except (PackError, SnapshotMismatch):
        # then all of the new one is sent
        return []
