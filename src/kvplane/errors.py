"""Every way this library refuses, as one tree.

After each refusal everything is as it was before the call.

* KVPlaneError
  x GeometryError            the model's shape is wrong, unknown or not supported
  x ArgumentError            an argument no call could mean (also a ValueError)
  x TensorMismatch           a tensor's shape, dtype or device is not the plane's
  + PositionError            a position that cannot be written, read or returned to
    x CacheDiscontinuity     a position was skipped or replayed
    x EvictedPosition        a position has left the live range
    x ContextFull            max_context is reached
    x WindowLost             a rewind needs rows that a ring no longer holds
    x CheckpointLost         a checkpoint's rows were overwritten by another branch
  + StepError                a step used out of turn
    x StepOpen               another step of this session is open
    x StepClosed             this step was committed or aborted already
    x StepIncomplete         a layer was not written
    x LayerRepeated          a layer was written twice in one step
    x ViewExpired            a chunk has replaced the window that was asked for
  + SessionError             a session that cannot be used this way
    x SessionClosed          it was closed
    x SessionBusy            another thread is inside it
    x SessionReadOnly        it may be read, not written
  + MemoryUnavailable        memory that could not be had (also a MemoryError)
    x LimitReached           the store's own limit
    x BackendUnavailable     the memory backend asked for by name does not work here
  x SnapshotMismatch         a snapshot is of another geometry, dtype or capacity
  x Overflow                 a value does not fit the dtype it is converted to
  x ExtraMissing             an optional dependency is not installed (also an ImportError)
  + PackError                the bytes of a pack are not what they claim
    x PackVersion            another format version
    x PackCorrupt            a file's bytes are not what its name or header says
    x PackMismatch           a pack of another model, dtype, geometry or numerics
    x PackMissing            a blob that something names is not there
    x PackTooLarge           a length passes the format's limit
    x SessionLocked          another process writes this session
    x SessionNotFound        no saved session of that name
    x KvpackRejected         bytes that are not what kvpack v1 demands
    + StorageError           the root cannot be read or written as asked
      x StorageMissing       nothing is stored under a name (also a FileNotFoundError)
  + TransferError            a handoff that did not happen: `kvplane.transfer.errors` has its tree
"""

from collections.abc import Sequence


class KVPlaneError(Exception):
    """Base of every error raised on purpose by this library."""


class GeometryError(KVPlaneError):
    """The model's shape is wrong, unknown or not supported."""

    def __init__(self, *, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field} = {value!r}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class ArgumentError(KVPlaneError, ValueError):
    """An argument that no call could mean."""

    def __init__(self, *, argument: str, expected: str, got: object) -> None:
        super().__init__(f"{argument}: expected {expected}, got {got!r}")
        self.argument = argument
        self.expected = expected
        self.got = got


class TensorMismatch(KVPlaneError):
    """A tensor's shape, dtype or device is not what the plane takes."""

    def __init__(self, *, layer: int | None, what: str, expected: object, got: object) -> None:
        where = "" if layer is None else f"layer {layer}: "
        super().__init__(f"{where}{what}: expected {expected}, got {got}")
        self.layer = layer
        self.what = what
        self.expected = expected
        self.got = got


class PositionError(KVPlaneError):
    """A position that cannot be written, read or returned to."""

    def __init__(self, message: str, *, position: int) -> None:
        super().__init__(message)
        self.position = position


class CacheDiscontinuity(PositionError):
    """A token arrived out of order; writing it would overwrite some other token's row."""

    def __init__(self, *, expected: int, got: int) -> None:
        super().__init__(
            f"expected position {expected}, got {got}; nothing was changed", position=got
        )
        self.expected = expected
        self.got = got


class EvictedPosition(PositionError):
    """The plane does not hold this position."""

    def __init__(self, *, position: int, first: int, stop: int) -> None:
        super().__init__(
            f"position {position} is outside the live range [{first}, {stop})", position=position
        )
        self.first = first
        self.stop = stop


class ContextFull(PositionError):
    """The tokens do not fit below max_context, whatever rows are free."""

    def __init__(self, *, position: int, num_tokens: int, max_context: int) -> None:
        super().__init__(
            f"{num_tokens} tokens from position {position} would pass "
            f"max_context {max_context}; nothing was changed",
            position=position,
        )
        self.num_tokens = num_tokens
        self.max_context = max_context


class WindowLost(PositionError):
    """A rewind needs sliding rows that were overwritten."""

    def __init__(self, *, position: int, group: str, first: int, stop: int) -> None:
        super().__init__(
            f"position {position} needs positions [{first}, {stop}) of {group}, "
            "which were overwritten; nothing was changed",
            position=position,
        )
        self.group = group
        self.first = first
        self.stop = stop


class CheckpointLost(PositionError):
    """A checkpoint's rows were overwritten after a rewind below it."""

    def __init__(self, *, position: int, rewound_to: int) -> None:
        super().__init__(
            f"the checkpoint at position {position} was lost by a rewind to {rewound_to}",
            position=position,
        )
        self.rewound_to = rewound_to


class StepError(KVPlaneError):
    """A step used out of turn."""


class StepOpen(StepError):
    """Another step of this session is open."""

    def __init__(self, *, first: int, stop: int) -> None:
        super().__init__(f"a step over positions [{first}, {stop}) is open in this session")
        self.first = first
        self.stop = stop


class StepClosed(StepError):
    """This step is not open: it was committed, aborted or never entered."""

    def __init__(self, *, first: int, stop: int, state: str) -> None:
        super().__init__(f"the step over positions [{first}, {stop}) is {state}, not open")
        self.first = first
        self.stop = stop
        self.state = state


class StepIncomplete(StepError):
    """Layers that were needed were not written in this step."""

    def __init__(self, *, layers: Sequence[int], aborted: bool) -> None:
        end = "the step was aborted" if aborted else "the step stays open"
        super().__init__(f"layers {list(layers)} were not written; {end}")
        self.layers = tuple(layers)
        self.aborted = aborted


class ViewExpired(StepError):
    """A chunk replaced rows of its own window when the next layer was written."""

    def __init__(self, *, layer: int) -> None:
        super().__init__(
            f"the chunk of layer {layer} replaced rows of its own window when the next layer was "
            "written; ask for its view before"
        )
        self.layer = layer


class LayerRepeated(StepError):
    """A layer was written twice in one step."""

    def __init__(self, *, layer: int) -> None:
        super().__init__(f"layer {layer} was already written in this step")
        self.layer = layer


class SessionError(KVPlaneError):
    """A session that cannot be used this way."""


class SessionClosed(SessionError):
    """The session was closed."""

    def __init__(self, *, position: int) -> None:
        super().__init__(f"the session (at position {position}) is closed")
        self.position = position


class SessionBusy(SessionError):
    """Another thread is inside this session."""

    def __init__(self) -> None:
        super().__init__("another thread is inside this session; a session has one at a time")


class SessionReadOnly(SessionError):
    """The session may be read, not written."""

    def __init__(self, *, what: str) -> None:
        super().__init__(f"this session is read-only: {what} would change it")
        self.what = what


class MemoryUnavailable(KVPlaneError, MemoryError):
    """Memory that could not be had."""


class LimitReached(MemoryUnavailable):
    """The store's own limit over all sessions."""

    def __init__(self, *, asked: int, held: int, limit: int) -> None:
        super().__init__(
            f"{asked} bytes more than the {held} held would pass the store's limit of {limit}"
        )
        self.asked = asked
        self.held = held
        self.limit = limit


class BackendUnavailable(MemoryUnavailable):
    """A memory backend asked for by name does not work here."""

    def __init__(self, *, backend: str, reason: str) -> None:
        super().__init__(f"memory backend {backend!r} is not available here: {reason}")
        self.backend = backend
        self.reason = reason


class SnapshotMismatch(KVPlaneError):
    """A snapshot does not fit the store it should be restored into."""

    def __init__(self, *, field: str, expected: object, got: object) -> None:
        super().__init__(f"snapshot {field}: the store has {expected}, the snapshot {got}")
        self.field = field
        self.expected = expected
        self.got = got


class Overflow(KVPlaneError):
    """A finite value does not fit the dtype it is converted to."""

    def __init__(self, *, value: float, dtype: str, what: str) -> None:
        super().__init__(f"{what}: {value} does not fit {dtype}")
        self.value = value
        self.dtype = dtype
        self.what = what


class ExtraMissing(KVPlaneError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, *, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed: pip install 'kvplane[{extra}]'", name=package
        )
        self.package = package
        self.extra = extra


class PackError(KVPlaneError):
    """The bytes of a pack are not what they claim."""


class PackVersion(PackError):
    """A file of another format version."""

    def __init__(self, *, path: str, expected: int, got: object) -> None:
        super().__init__(f"{path}: format {got!r}, this version reads format {expected}")
        self.path = path
        self.expected = expected
        self.got = got


class PackCorrupt(PackError):
    """A file's bytes are not what its name or header says."""

    def __init__(self, *, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path
        self.what = what


class PackMismatch(PackError):
    """A pack of another model, dtype, geometry or numerics."""

    def __init__(self, *, field: str, expected: object, got: object) -> None:
        super().__init__(f"{field}: expected {expected!r}, the pack has {got!r}")
        self.field = field
        self.expected = expected
        self.got = got


class PackMissing(PackError):
    """A blob that a cut or session names is not there."""

    def __init__(self, *, blob: str, needed_by: str) -> None:
        super().__init__(f"blob {blob} is missing; {needed_by} needs it")
        self.blob = blob
        self.needed_by = needed_by


class PackTooLarge(PackError):
    """A length passes the format's limit; nothing was allocated for it."""

    def __init__(self, *, what: str, limit: int, got: int) -> None:
        super().__init__(f"{what} is {got}, the limit is {limit}")
        self.what = what
        self.limit = limit
        self.got = got


class SessionLocked(PackError):
    """Another process writes this session."""

    def __init__(self, *, name: str, host: str, pid: int, since: str) -> None:
        super().__init__(f"session {name!r} is in use by process {pid} on {host} since {since}")
        self.name = name
        self.host = host
        self.pid = pid
        self.since = since


class SessionNotFound(PackError):
    """No saved session of that name."""

    def __init__(self, *, name: str, nearest: Sequence[str]) -> None:
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        super().__init__(f"no session {name!r}{hint}")
        self.name = name
        self.nearest = tuple(nearest)


class KvpackRejected(PackError):
    """Bytes that are not what kvpack v1 demands; `category` is that format's own word for it."""

    def __init__(self, *, category: str, what: str) -> None:
        super().__init__(f"kvpack ({category}): {what}")
        self.category = category
        self.what = what


class StorageError(PackError):
    """The root cannot be read or written as asked."""

    def __init__(self, *, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path
        self.what = what


class StorageMissing(StorageError, FileNotFoundError):
    """Nothing is stored under a name."""

    def __init__(self, *, path: str) -> None:
        super().__init__(path=path, what="nothing is stored under this name")


class TransferError(KVPlaneError):
    """A session did not move to another machine; the receiver's store is as it was."""
