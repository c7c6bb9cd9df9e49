"""What a connector was told in `kv_connector_extra_config`, and how it says what went wrong."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from kvplane.errors import ArgumentError
from kvplane.pack import open_root
from kvplane.storage import Storage

# vLLM's own handlers take what is said below its name
LOGGER = logging.getLogger("vllm.kvplane")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """How a connector works.

    Args:
        root: of packs: a folder or an address.
        weights: what identifies the model's weights; "" takes revision or files.
        salt: of the tenant.
        every: tokens between cuts of a long prompt; None: max(2048, 4 x largest window); 0: none.
        match_timeout_s: a root that has not answered by then has nothing.
        load_timeout_s: a load that has not ended by then has failed.
        backlog_nbytes: copies that wait to be written; beyond it cuts are left out.
        flush_timeout_s: how long an engine that ends waits for what is not yet written.
    """

    root: str
    weights: str = ""
    salt: str = ""
    every: int | None = None
    match_timeout_s: float = 5.0
    load_timeout_s: float = 60.0
    backlog_nbytes: int = 4 << 30
    flush_timeout_s: float = 60.0

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Self:
        """Read a configuration: ArgumentError names what is missing, unknown or no such value."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown or not isinstance(extra.get("root"), str) or not extra["root"]:
            raise ArgumentError(
                argument="kv_connector_extra_config",
                expected=f'"root", and of {sorted(known)}',
                got=unknown or dict(extra),
            )
        options = cls(**extra)
        if options.every is not None and (type(options.every) is not int or options.every < 0):
            raise ArgumentError(argument="every", expected="at least 0", got=options.every)
        for name in ("match_timeout_s", "load_timeout_s", "backlog_nbytes", "flush_timeout_s"):
            value = getattr(options, name)
            if type(value) not in (int, float) or value < 0:
                raise ArgumentError(argument=name, expected="a number from 0", got=value)
        return options

    def salt_of(self, request_salt: str | None) -> bytes:
        """The tenant's salt, with a request's own behind it."""
        if not request_salt:
            return self.salt.encode()
        return f"{self.salt}\0{request_salt}".encode()


class Once:
    """Says each kind of trouble the first time that it happens."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._guard = threading.Lock()

    def say(self, kind: str, error: object) -> None:
        """Warn, unless that kind was warned of before."""
        with self._guard:
            if kind in self._said:
                return
            self._said.add(kind)
        LOGGER.warning("kvplane: %s; the engine computes itself (said once): %s", kind, error)


class Root:
    """A root of packs, opened when it is first needed, from any thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._storage: Storage | None = None
        self._guard = threading.Lock()

    def storage(self) -> Storage:
        """The opened root: StorageError, PackCorrupt, as `open_root`; asked again next time."""
        with self._guard:
            if self._storage is None:
                self._storage = open_root(self._address, create=True)
            return self._storage
