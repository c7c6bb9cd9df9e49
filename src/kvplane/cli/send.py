"""`kvplane send`: a saved session to another machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from kvplane.cli.links import identity_of, rate, shown
from kvplane.cli.output import both, console, print_table
from kvplane.errors import ArgumentError
from kvplane.home import home

if TYPE_CHECKING:
    from kvplane.pack import SavedSession
    from kvplane.store import KVStore
    from kvplane.transfer import Schedule


def send(
    session: str,
    /,
    *,
    to: str | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    schedule: str = "streamed",
    chunk: int = 8192,
    cut: int = 0,
    timeout: float = 600.0,
    idle_timeout: float = 30.0,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Send a saved session to a machine where `kvplane receive` waits; it stays here too.

    Example: kvplane send notes --to decode.example:7700 --certificate me.crt --key me.key
    --authority ca.pem

    Args:
        session: The session's name.
        to: host:port, or unix: and a path.
        certificate: PEM file, for TLS.
        key: PEM file of its private key.
        authority: PEM file of whom the receiver's certificate must be from.
        insecure: Send plain bytes to another machine.
        schedule: streamed or chapter: in which order.
        chunk: Tokens of a segment.
        cut: With --dry-run: as if the receiver held so many tokens.
        timeout: Seconds, of the whole.
        idle_timeout: Seconds, of a wait in which nothing moves.
        dry_run: Only say what would be sent, in bytes.
    """
    from kvplane.pack import Fingerprint, load_session, open_root, read_session  # noqa: PLC0415
    from kvplane.transfer import Schedule, connect  # noqa: PLC0415
    from kvplane.transfer import send as send_session  # noqa: PLC0415

    storage = open_root(home(), create=True)
    saved = read_session(storage, session)
    store = store_of(saved)
    if dry_run:
        plan = Schedule(
            geometry=store.geometry,
            position=saved.state.position,
            cut=cut,
            name=schedule,
            chunk=chunk,
            first_position=saved.first_position,
            held={name: cursor[2] for name, cursor in saved.cursors.items()},
        )
        print_plan(plan)
        return
    if to is None:
        raise ArgumentError(argument="to", expected="an address, or --dry-run", got=None)
    if saved.state.states is not None:
        raise ArgumentError(
            argument="session", expected="rows alone: states are not sent", got=session
        )
    identity = identity_of(certificate, key, authority)
    fingerprint = Fingerprint(saved.parts)
    notes = Console(stderr=True, highlight=False)
    _, loaded = load_session(storage, session, store, fingerprint)
    link = connect(to, identity=identity, insecure=insecure)
    try:
        with shown(notes, "sending") as progress:
            sent = send_session(
                loaded.session,
                link,
                fingerprint=fingerprint,
                schedule=schedule,
                chunk=chunk,
                timeout_s=timeout,
                idle_timeout_s=idle_timeout,
                progress=progress,
            )
    finally:
        link.close()
    why = f" ({sent.reason})" if sent.reason else ""
    notes.print(
        f"sent session {session}: the receiver can use {sent.tokens:,} tokens, "
        f"{sent.cut:,} of which it held{why}",
        soft_wrap=True,
    )
    notes.print(
        f"{both(sent.nbytes, notes)} in {sent.num_segments:,} segments, {sent.seconds:.2f} s, "
        f"{rate(sent.nbytes, sent.seconds)}",
        soft_wrap=True,
    )


def store_of(saved: "SavedSession") -> "KVStore":
    """A store with planes like those that a saved session lay in."""
    from kvplane.pack.geometries import geometry_of  # noqa: PLC0415
    from kvplane.store import KVStore  # noqa: PLC0415

    geometry = geometry_of(saved.geometry, f"session {saved.name}")
    windows = {group.id: group.sliding_window for group in geometry.groups}
    full = [saved.cursors[name][0] for name, window in windows.items() if window is None]
    slack = [saved.cursors[name][0] - window for name, window in windows.items() if window]
    return KVStore(
        geometry,
        max_context=max([*full, saved.state.position, 1]),
        slack=max([0, *slack]),
        memory="heap",
    )


def print_plan(plan: "Schedule") -> None:
    """What a schedule sends, by kind and in all."""
    out = console()
    rows = []
    for what, sliding in (("sliding layers", True), ("full layers", False)):
        segments = [each for each in plan.segments if each.group.is_sliding is sliding]
        nbytes = sum(segment.nbytes for segment in segments)
        rows.append([what, f"{len(segments):,}", both(nbytes, out)])
    rows.append(["together", f"{plan.num_segments:,}", both(plan.payload.total, out)])
    title = f"{plan.position - plan.first_position:,} tokens, {plan.cut:,} held, {plan.name}"
    print_table(out, title, ["", "segments", "bytes"], rows)
