"""Requests to an object store, bounded in number and time, and their errors by name."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from kvplane.errors import ExtraMissing, KVPlaneError, PackTooLarge, StorageError, StorageMissing

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, PutMode
    from obstore.store import ClientConfig, ObjectStore

_STREAM_NBYTES = 1 << 20
_MESSAGE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a server, in seconds.

    Args:
        timeout_s: for one request, its answer's body included.
        deadline_s: for a request and its repetitions; then the last one may still take timeout_s.
        connect_s: for a connection.
        retries: repetitions.
        pause_s: before the first repetition; later ones wait longer.
    """

    timeout_s: float = 60.0
    deadline_s: float = 120.0
    connect_s: float = 5.0
    retries: int = 8
    pause_s: float = 0.2


class Found(NamedTuple):
    """What the server says of an object."""

    nbytes: int
    modified: float
    version: str | None


class Object(NamedTuple):
    """An object whole."""

    data: bytes
    version: str | None


class Coming(NamedTuple):
    """Bytes on their way: how many, of which version, and the parts as they arrive."""

    nbytes: int
    version: str | None
    parts: Iterator[memoryview]


class Client:
    """One store; every method raises StorageError, or StorageMissing, that names the object."""

    def __init__(
        self, url: str, *, parallel: int, patience: Patience, store: "ObjectStore | None"
    ) -> None:
        try:
            import obstore  # noqa: PLC0415
            import obstore.exceptions  # noqa: PLC0415
        except ImportError as error:
            raise ExtraMissing(package="obstore", extra="s3") from error
        self._obstore = obstore
        self._errors = obstore.exceptions
        self._gate = threading.BoundedSemaphore(parallel)
        self._url = url
        self.patience = patience
        self._store = self._opened(url) if store is None else store

    def path(self, name: str) -> str:
        """What messages call an object."""
        return f"{self._url}/{name}" if name else self._url

    def check(self) -> None:
        """Nothing, when the bucket answers."""
        with self._asking("", missing_is_error=True):
            next(iter(self._obstore.list(self._store, chunk_size=1)), None)

    def head(self, name: str) -> Found:
        """What is known of an object."""
        with self._asking(name):
            meta = self._obstore.head(self._store, name)
        return Found(meta["size"], meta["last_modified"].timestamp(), meta["e_tag"])

    def get(self, name: str, *, limit: int | None) -> Object:
        """An object; its size is compared with `limit` before memory is taken for it."""
        coming = self.start(name)
        if limit is not None and coming.nbytes > limit:
            what = f"the size of {self.path(name)}"
            raise PackTooLarge(what=what, limit=limit, got=coming.nbytes)
        data = bytearray()
        for part in coming.parts:
            data += part
        if len(data) != coming.nbytes:
            what = f"{len(data)} of {coming.nbytes} bytes came"
            raise StorageError(path=self.path(name), what=what)
        return Object(bytes(data), coming.version)

    def start(
        self, name: str, *, part: tuple[int, int] | None = None, version: str | None = None
    ) -> Coming:
        """An object's bytes, or a part [first, stop) of them, about to come.

        One request: what comes is of one version, and of `version` if that is given.
        """
        options: GetOptions = {}
        if part is not None:
            options["range"] = part
        if version is not None:
            options["if_match"] = version
        with self._asking(name):
            try:
                result = self._obstore.get(self._store, name, options=options)
            except self._errors.PreconditionError as error:
                what = "was replaced while it was read"
                raise StorageError(path=self.path(name), what=what) from error
        nbytes = result.meta["size"] if part is None else part[1] - part[0]
        return Coming(nbytes, result.meta["e_tag"], self._parts(name, result, nbytes))

    def _parts(self, name: str, result: "GetResult", nbytes: int) -> Iterator[memoryview]:
        with self._asking(name):
            stream = iter(result.stream(min_chunk_size=_STREAM_NBYTES))
        while True:
            # others may ask while whoever reads this is busy with what came
            with self._asking(name):
                data = next(stream, None)
            if data is None:
                return
            view = memoryview(data)
            nbytes -= len(view)
            if nbytes < 0:
                raise StorageError(path=self.path(name), what="more bytes came than it has")
            yield view

    def names(self, folder: str) -> Iterator[str]:
        """Every object's name below a folder; "" is the root."""
        with self._asking(folder, missing_is_error=True):
            stream = iter(self._obstore.list(self._store, folder or None))
        while True:
            with self._asking(folder, missing_is_error=True):
                batch = next(stream, None)
            if batch is None:
                return
            for meta in batch:
                yield meta["path"]

    def top(self) -> list[str]:
        """What the root holds: names without those below folders."""
        with self._asking("", missing_is_error=True):
            found = self._obstore.list_with_delimiter(self._store)
        names = [meta["path"] for meta in found["objects"]]
        return [*names, *(prefix.rstrip("/") for prefix in found["common_prefixes"])]

    def create(self, name: str, data: memoryview | bytes) -> str | None:
        """The version of a new object; None where there is one already."""
        return self._put(name, data, "create")

    def update(self, name: str, data: memoryview | bytes, *, version: str | None) -> str | None:
        """The new version of an object; None where it is no longer of `version`."""
        return self._put(name, data, {"e_tag": version})

    def overwrite(self, name: str, data: memoryview | bytes) -> str | None:
        """The version of an object that takes the place of another."""
        return self._put(name, data, "overwrite")

    def delete(self, name: str) -> None:
        """No such object any more."""
        with self._asking(name):
            try:
                self._obstore.delete(self._store, name)
            except (FileNotFoundError, self._errors.NotFoundError):
                return

    def copy(self, name: str, new: str) -> None:
        """The same bytes under another name too, by the server itself."""
        with self._asking(name):
            self._obstore.copy(self._store, name, new)

    def pause(self, number: int) -> None:
        """Wait before the n-th repetition, not in step with others."""
        # no secret depends on it
        time.sleep(self.patience.pause_s * 2 ** (number - 1) * random.uniform(0.5, 1))  # noqa: S311

    def _put(self, name: str, data: memoryview | bytes, mode: "PutMode") -> str | None:
        with self._asking(name):
            try:
                # in one request: in several, nothing could make it conditional
                done = self._obstore.put(self._store, name, data, mode=mode, use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return None
        return done["e_tag"] or ""

    @contextmanager
    def _asking(self, name: str, *, missing_is_error: bool = False) -> Iterator[None]:
        with self._gate:
            try:
                yield
            except KVPlaneError:
                raise
            except (FileNotFoundError, self._errors.NotFoundError) as error:
                if missing_is_error:
                    raise StorageError(path=self.path(name), what=_said(error)) from error
                raise StorageMissing(path=self.path(name)) from error
            except (self._errors.BaseError, OSError, ValueError) as error:
                raise StorageError(path=self.path(name), what=_said(error)) from error

    def _opened(self, url: str) -> "ObjectStore":
        from obstore.store import from_url  # noqa: PLC0415

        patience = self.patience
        client: ClientConfig = {
            "timeout": timedelta(seconds=patience.timeout_s),
            "connect_timeout": timedelta(seconds=patience.connect_s),
        }
        endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        if endpoint.startswith("http://"):
            # whoever names such an endpoint means it
            client["allow_http"] = True
        try:
            return from_url(
                url,
                client_options=client,
                retry_config={
                    "max_retries": patience.retries,
                    "retry_timeout": timedelta(seconds=patience.deadline_s),
                    "backoff": {"init_backoff": timedelta(seconds=patience.pause_s)},
                },
            )
        except (self._errors.BaseError, OSError, ValueError) as error:
            raise StorageError(path=url, what=_said(error)) from error


def _said(error: BaseException) -> str:
    """The first line of what a library says; the rest is for its own developers."""
    said = str(error).strip().split("\n", 1)[0]
    return said if len(said) <= _MESSAGE else f"{said[:_MESSAGE]}..."
