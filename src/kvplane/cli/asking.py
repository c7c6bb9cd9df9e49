"""A prompt that another machine reads: `kvplane run --prefill-from`."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from kvplane.cli.links import rate, shown
from kvplane.cli.output import human

if TYPE_CHECKING:
    from kvplane.integrations.transformers.conversation import Conversation
    from kvplane.transfer.links import Identity


class Asking:
    """Who reads prompts for this machine.

    Args:
        address: host:port, or unix: and a path.
        identity: for TLS.
        insecure: allow plain TCP to another machine.
    """

    def __init__(self, address: str, identity: "Identity | None", *, insecure: bool) -> None:
        self._address = address
        self._identity = identity
        self._insecure = insecure

    def fill(self, talk: "Conversation", ids: Sequence[int], notes: Console) -> None:
        """Have all of a prompt but its last token read there, into an empty conversation.

        Raises:
            TransferError: it failed; the conversation is empty.
        """
        from kvplane.integrations.transformers.handoff import receive_into  # noqa: PLC0415
        from kvplane.transfer import connect  # noqa: PLC0415 - torch, seconds
        from kvplane.transfer.clock import Clock  # noqa: PLC0415
        from kvplane.transfer.request import ask  # noqa: PLC0415

        link = connect(self._address, identity=self._identity, insecure=self._insecure)
        with contextlib.closing(link), shown(notes, "reading there") as progress:
            ask(link, ids, Clock())
            received = receive_into(
                talk.cache, link, fingerprint=talk.named.fingerprint, progress=progress
            )
        notes.print(
            f"{received.tokens:,} of {len(ids):,} tokens read by {self._address}: "
            f"{human(received.nbytes)}, {received.seconds:.2f} s, "
            f"{rate(received.nbytes, received.seconds)}",
            soft_wrap=True,
        )
