"""What `kvplane doctor` tries: a ring wrapped, taken back, restored, saved and found damaged."""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvplane.errors import KVPlaneError, PackCorrupt, WindowLost
from kvplane.geometry import FULL, SLIDING, ModelGeometry
from kvplane.pack import Fingerprint, load, save
from kvplane.session import Session
from kvplane.store import KVStore

KINDS = (SLIDING, FULL)
WINDOW, CONTEXT, TOKENS = 64, 512, 300
GEOMETRY = ModelGeometry.uniform(KINDS, sliding_window=WINDOW, num_kv_heads=2, head_dim=32)


class Part(NamedTuple):
    """One thing that was tried."""

    what: str
    good: bool
    seconds: float
    note: str


def small_store(device: str) -> KVStore:
    """A store of a ring and a full plane: BackendUnavailable, ExtraMissing."""
    return KVStore(GEOMETRY, max_context=CONTEXT, device=device)


def selftest() -> list[Part]:
    """Every part on the CPU, and attention on each GPU; a part that raises has failed."""
    parts = [
        _tried("a restored session goes on with the same bits", _restored),
        _tried("a rewind past the ring is refused and changes nothing", _refused),
        _tried("a saved session comes back, and a flipped bit is found", _saved),
    ]
    for number in range(torch.cuda.device_count()):
        device = f"cuda:{number}"
        parts.append(_tried(f"the same on {device}", partial(_restored, device)))
    return parts


def _tried(what: str, check: Callable[[], bool]) -> Part:
    begin = time.perf_counter()
    note = ""
    try:
        good = check()
    except (KVPlaneError, RuntimeError, OSError) as error:
        good, note = False, f"{type(error).__name__}: {error}"
    return Part(what, good, time.perf_counter() - begin, note)


def _rows(device: str) -> Tensor:
    """Query, key and value of every layer and token."""
    generator = torch.Generator().manual_seed(15)
    shape = (3, len(KINDS), CONTEXT, 2, 32)
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def _read(session: Session, rows: Tensor, stop: int, num_tokens: int) -> Iterator[Tensor]:
    while session.position < stop:
        with session.step(min(num_tokens, stop - session.position)) as step:
            for layer in range(len(KINDS)):
                yield step.attend(layer, *rows[:, layer, step.first : step.stop])


def _filled(device: str) -> tuple[Session, Tensor]:
    session, rows = small_store(device).open(), _rows(device)
    for _ in _read(session, rows, TOKENS, 50):
        pass
    return session, rows


def _restored(device: str = "cpu") -> bool:
    session, rows = _filled(device)
    twin = session.store.restore(session.snapshot())
    stop = TOKENS + 20
    pairs = zip(_read(session, rows, stop, 1), _read(twin, rows, stop, 1), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


def _refused() -> bool:
    session, _ = _filled("cpu")
    try:
        session.rewind(TOKENS - WINDOW)
    except WindowLost:
        return session.position == TOKENS
    return False


def _saved() -> bool:
    session, _ = _filled("cpu")
    fingerprint = Fingerprint.of(GEOMETRY, weights="selftest")
    with tempfile.TemporaryDirectory(prefix="kvplane-doctor-") as root:
        save(root, "one", session, fingerprint, tokens=range(TOKENS))
        _, loaded = load(root, "one", small_store("cpu"), fingerprint)
        same = all(
            torch.equal(session.planes[layer].key, loaded.session.planes[layer].key)
            for layer in range(len(KINDS))
        )
        blob = next(Path(root).glob("blobs/*/*"))
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.write_bytes(data)
        try:
            load(root, "one", small_store("cpu"), fingerprint)
        except PackCorrupt:
            return same
    return False
