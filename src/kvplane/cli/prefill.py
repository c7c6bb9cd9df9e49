"""`kvplane prefill`: read prompts for other machines, which answer them."""

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from kvplane.cli.links import identity_of, rate
from kvplane.cli.receive import accepted
from kvplane.errors import KVPlaneError

if TYPE_CHECKING:
    from kvplane.integrations.transformers.loading import NamedModel
    from kvplane.transfer import Sent
    from kvplane.transfer.links import SocketLink


def prefill(
    *,
    listen: str,
    model: str = "glimmer-nano",
    dtype: str | None = None,
    device: str = "cpu",
    max_context: int | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    number: int | None = None,
    wait: float = 86_400.0,
    timeout: float = 600.0,
    idle_timeout: float = 30.0,
) -> None:
    """Read prompts for `kvplane run --prefill-from`, one after another; rows go out meanwhile.

    Example: kvplane prefill --listen 127.0.0.1:7700

    Args:
        listen: host:port (port 0 takes a free one), or unix: and a path.
        model: glimmer-nano (shipped), a folder, or an id.
        dtype: float32, bfloat16 or float16; the model's own unless given.
        device: cpu, cuda, ...
        max_context: Prompts are shorter; the model's own unless given.
        certificate: PEM file, for TLS.
        key: PEM file of its private key.
        authority: PEM file of whom an asker's certificate must be from.
        insecure: Take plain bytes from other machines.
        number: End after so many prompts.
        wait: Seconds until somebody must have come.
        timeout: Seconds, of a whole prompt.
        idle_timeout: Seconds, of a wait in which nothing moves.
    """
    from kvplane.integrations.transformers import loading  # noqa: PLC0415 - torch, seconds
    from kvplane.transfer import Listener  # noqa: PLC0415

    identity = identity_of(certificate, key, authority)
    loading.check_hybrid(loading.config_of(model), model)
    named = loading.load_model(model, dtype=dtype, device=device)
    notes = Console(stderr=True, highlight=False)
    with Listener(listen, identity=identity, insecure=insecure) as listener:
        notes.print(f"listening on {listener.address}", soft_wrap=True)
        for _ in itertools.count() if number is None else range(number):
            link = accepted(listener, notes, wait_s=wait)
            with contextlib.closing(link):
                try:
                    sent = _served(
                        named,
                        link,
                        max_context=max_context,
                        timeout_s=timeout,
                        idle_timeout_s=idle_timeout,
                    )
                except KVPlaneError as error:
                    # the next one's prompt is another matter
                    notes.print(f"failed: {error}", soft_wrap=True)
                    continue
            notes.print(
                f"read and sent {sent.tokens:,} tokens in {sent.seconds:.2f} s, "
                f"{rate(sent.nbytes, sent.seconds)}",
                soft_wrap=True,
            )


def _served(
    named: "NamedModel",
    link: "SocketLink",
    *,
    max_context: int | None,
    timeout_s: float,
    idle_timeout_s: float,
) -> "Sent":
    from kvplane.integrations.transformers.conversation import converse  # noqa: PLC0415
    from kvplane.integrations.transformers.handoff import StreamingPrefill  # noqa: PLC0415
    from kvplane.transfer.clock import Clock  # noqa: PLC0415
    from kvplane.transfer.request import asked, decline  # noqa: PLC0415

    cache = converse(named, max_context=max_context).cache
    ids = asked(link, Clock(timeout_s, idle_timeout_s), max_tokens=cache.max_context)
    prefiller = StreamingPrefill(
        named.model,
        cache,
        link,
        fingerprint=named.fingerprint,
        timeout_s=timeout_s,
        idle_timeout_s=idle_timeout_s,
    )
    try:
        return prefiller.read(ids)
    except KVPlaneError as error:
        with contextlib.suppress(KVPlaneError):
            decline(link, str(error))
        raise
    finally:
        cache.close()
