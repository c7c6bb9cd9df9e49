"""What the scheduler's side asks of the workers' side."""

from dataclasses import dataclass

from kvplane.pack.documents import Cut

Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Fill a waiting request's blocks.

    Args:
        request: id.
        cut: whose rows.
        file: of the cut.
        local: positions below are the engine's own, and may be shared: never written.
        tables: block ids, by the engine's groups.
    """

    request: str
    cut: Cut
    file: str
    local: int
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob:
    """Take cuts of a request whose step has just ended.

    Args:
        request: id.
        ids: packed, up to the deepest cut.
        cuts: positions inside the step, ascending.
        local: positions below were found in the engine's own memory.
        salt: of the tenant.
        tables: block ids, by the engine's groups.
    """

    request: str
    ids: bytes
    cuts: tuple[int, ...]
    local: int
    salt: bytes
    tables: Tables
