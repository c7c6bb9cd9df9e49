"""A cache that is filled on one machine and goes on on another.

StreamingPrefill(model, cache, link).read(ids)        prefill machine, all but the last token
receive_into(cache, link)                             decode machine, then call(model, ids[-1:])
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvplane.errors import ArgumentError
from kvplane.integrations.transformers.calls import prefill
from kvplane.integrations.transformers.identity import fingerprint_of
from kvplane.pack import Fingerprint
from kvplane.session import Session
from kvplane.transfer import Received, Sent, Streaming, receive
from kvplane.transfer.links import Link

if TYPE_CHECKING:
    from kvplane.integrations.transformers.cache import HybridCache


class StreamingPrefill:
    """Reads a prompt and sends its rows meanwhile, layer by layer and chunk by chunk.

    Args:
        model: a causal language model of transformers.
        cache: made for it; may hold a beginning of the prompt.
        link: to a receiver.
        fingerprint: of the model; None: its own.
        options: of `kvplane.transfer.Streaming`: schedule, chunk, timeouts, progress.

    Raises:
        ArgumentError: another model's cache, or layers that keep states beside the store's rows.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - any transformers model
        cache: "HybridCache",
        link: Link,
        *,
        fingerprint: Fingerprint | None = None,
        **options: Any,  # noqa: ANN401 - named in Streaming
    ) -> None:
        if cache.model is not model:
            raise ArgumentError(argument="cache", expected="one made for this model", got=cache)
        _check_rows_only(cache)
        self._model = model
        self._cache = cache
        self._link = link
        self._fingerprint = fingerprint or fingerprint_of(model)
        self._options = options

    def read(self, ids: Sequence[int]) -> Sent:
        """Read all of a prompt but its last token, which the receiver runs.

        Args:
            ids: the whole prompt; the cache holds a beginning of it.

        Returns:
            What the receiver confirmed. The cache holds the same tokens.

        Raises:
            ArgumentError: the cache holds other tokens, or the prompt has fewer than two.
            ContextFull: it does not fit.
            TransferError: the handoff failed; the cache holds what was read.
        """
        stream = Streaming(
            _session_of(self._cache),
            self._link,
            ids,
            fingerprint=self._fingerprint,
            **self._options,
        )
        with stream, ExitStack() as hooks:
            for module in self._model.modules():
                if type(getattr(module, "layer_idx", None)) is int:
                    handle = module.register_forward_hook(lambda *_: stream.note())
                    hooks.callback(handle.remove)
            prefill(self._model, self._cache, list(ids)[:-1], after=lambda _: stream.note())
            return stream.finish()


def receive_into(
    cache: "HybridCache",
    link: Link,
    *,
    fingerprint: Fingerprint | None = None,
    **options: Any,  # noqa: ANN401 - named in receive
) -> Received:
    """Fill an empty cache with a session from a link.

    Args:
        cache: made for a model.
        link: to a sender.
        fingerprint: of the model; None: its own.
        options: of `kvplane.transfer.receive`.

    Raises:
        ArgumentError: the cache holds tokens, or has layers that keep states.
        TransferError: as `receive`. The cache is empty.
    """
    if cache.seen:
        raise ArgumentError(argument="cache", expected="an empty one", got=cache.seen)
    _check_rows_only(cache)
    model = cache.model
    store = cache.made_store(model.dtype, model.device)
    made = fingerprint or fingerprint_of(model)
    received = receive(store, link, fingerprint=made, **options)
    cache.adopt(received.session, {})
    return received


def _session_of(cache: "HybridCache") -> Session:
    """The cache's session; an empty one is made before the first key shows what it must be."""
    if cache.session is None:
        store = cache.made_store(cache.model.dtype, cache.model.device)
        cache.adopt(store.open(()))
    session = cache.session
    if session is None:
        raise ArgumentError(argument="cache", expected="one with a session", got=cache)
    return session


def _check_rows_only(cache: "HybridCache") -> None:
    if cache.states():
        raise ArgumentError(
            argument="cache", expected="store layers alone: states are not sent", got="others"
        )
