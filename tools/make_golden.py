"""Golden packs of format 1: written once, loaded by every later version.

    windows     f16, windows of 32 and 64 and full layers: cuts at 256 and 300, a session of 333
    rows        bf16, a window of 16, a full layer and one that shares its rows: the second of two
                sequences, a session of one token, an empty one

`digests.json` beside them says what every row must be. It is computed from `bits`, not from what
was written. Nothing that is there is ever written again.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from kvplane import KVStore, LayerGeometry, ModelGeometry, Rotary
from kvplane.errors import KVPlaneError
from kvplane.pack import Aux, Fingerprint, PrefixCache, open_root, save_session
from kvplane.session import Session
from kvplane.storage import Storage

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
SLIDING, FULL = "sliding_attention", "full_attention"
ROTARY = Rotary(base=10_000.0, dim=4, scaling=(("factor", 8.0), ("rope_type", "linear")))
OTHERS = (Aux(10, 40, "audio", "c3" * 32), Aux(270, 290, "image", "5a" * 32))
# finite in every bit pattern: one bit of the exponent is never set
FINITE = {torch.float16: 0xFBFF, torch.bfloat16: 0xFF7F}

WINDOWS = ModelGeometry(
    layers=tuple(
        LayerGeometry(
            kind=kind,
            sliding_window=window,
            num_kv_heads=2,
            head_dim=4,
            value_head_dim=4,
            rotary=None if window is None else ROTARY,
        )
        for kind, window in ((SLIDING, 32), (SLIDING, 64), (FULL, None)) * 4
    ),
    dtype="float16",
)
ROWS = ModelGeometry(
    layers=(
        LayerGeometry(
            kind=SLIDING, sliding_window=16, num_kv_heads=1, head_dim=8, value_head_dim=4
        ),
        LayerGeometry(kind=FULL, num_kv_heads=1, head_dim=8, value_head_dim=8),
        LayerGeometry(kind=FULL, num_kv_heads=1, head_dim=8, value_head_dim=8, shares_kv_with=1),
    ),
    dtype="bfloat16",
)


def id_at(position: int) -> int:
    """The token id of a position: some are large."""
    return (position * 2_654_435_761) % (1 << 32) if position % 7 == 0 else position


def bits(
    layer: int, what: int, positions: range, *, heads: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """Rows `[positions, heads, dim]` of a layer's keys (0) or values (1): finite, of any bits."""
    position = torch.tensor(list(positions), dtype=torch.int64)[:, None, None]
    head = torch.arange(heads)[:, None]
    pattern = position * 40_503 + layer * 7_919 + what * 30_011 + head * 1_553 + torch.arange(dim)
    pattern = (pattern * 25_173 + 13_849) & FINITE[dtype]
    return torch.where(pattern < 1 << 15, pattern, pattern - (1 << 16)).to(torch.int16).view(dtype)


def step(session: Session, count: int) -> None:
    """Add tokens; the second sequence of a batch holds what an ordinary session would."""
    first = session.position
    ids = [id_at(position) for position in range(first, first + count)]
    batch = session.batch
    given: Any = ids if batch is None else [[7] * count] * (batch - 1) + [ids]
    with session.step(given) as opened:
        for group in session.groups:
            for layer in group.layers:
                key, value = rows(session, layer, range(first, first + count))
                if batch is not None:
                    key = torch.stack([torch.zeros_like(key)] * (batch - 1) + [key])
                    value = torch.stack([torch.zeros_like(value)] * (batch - 1) + [value])
                opened.write(layer, key, value)


def rows(session: Session, layer: int, positions: range) -> tuple[Tensor, Tensor]:
    """Key and value of a layer at some positions."""
    group = session.geometry.group_of(layer)
    dtype = getattr(torch, group.dtype)
    heads = group.num_kv_heads
    return (
        bits(layer, 0, positions, heads=heads, dim=group.head_dim, dtype=dtype),
        bits(layer, 1, positions, heads=heads, dim=group.value_head_dim, dtype=dtype),
    )


def expected(
    session: Session, firsts: dict[str, int], *, aux: Sequence[Aux] = ()
) -> dict[str, Any]:
    """What a reader must find: ids, other inputs, and the digest of every layer's rows."""
    ids = torch.tensor([id_at(position) for position in range(session.position)], dtype=torch.int64)
    found = {}
    for group in session.groups:
        for layer in group.layers:
            live = range(firsts[group.id], session.position)
            for what, tensor in zip(("key", "value"), rows(session, layer, live), strict=True):
                found[f"layers.{layer}.{what}"] = digest_of(tensor)
    return {
        "position": session.position,
        "tokens": blake3(ids.to(torch.uint32).numpy().tobytes()).hexdigest(),
        "aux": [list(item) for item in aux],
        "firsts": firsts,
        "rows": found,
    }


def digest_of(tensor: Tensor) -> str:
    """Hex of the BLAKE3 of a tensor's elements, bits as they are."""
    return blake3(tensor.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


def make_windows(storage: Storage) -> dict[str, Any]:
    """The first pack, and what it holds."""
    fingerprint = Fingerprint.of(WINDOWS, weights="golden windows")
    prefixes = PrefixCache(storage, fingerprint)
    session = KVStore(WINDOWS, max_context=512, memory="heap", slack=16).open(tokens=[])
    facts: dict[str, Any] = {"cuts": {}, "sessions": {}}
    for count in (256, 44):
        step(session, count)
        ids = [id_at(position) for position in range(session.position)]
        aux = [item for item in OTHERS if item.first < session.position]
        prefixes.publish(session, ids, aux=aux)
        firsts = {
            group.id: max(0, session.position - ((group.sliding_window or 1 << 20) - 1))
            for group in session.groups
        }
        facts["cuts"][str(session.position)] = expected(session, firsts, aux=aux)
    for count in (1, 31, 1):
        step(session, count)
    save_session(
        storage,
        "long",
        session,
        fingerprint,
        aux=OTHERS,
        tokenizer="a tokenizer of 2^32 ids",
        template="{{ größe }}",
    )
    facts["sessions"]["long"] = saved(session, aux=OTHERS)
    return facts


def make_rows(storage: Storage) -> dict[str, Any]:
    """The second pack, and what it holds."""
    fingerprint = Fingerprint.of(ROWS, weights="golden rows")
    store = KVStore(ROWS, max_context=128, memory="heap")
    sessions = {
        "batch.row-1": (store.open(tokens=[], batch=2), 40),
        "one": (store.open(tokens=[]), 1),
        "empty": (store.open(tokens=[]), 0),
    }
    facts: dict[str, Any] = {"cuts": {}, "sessions": {}}
    for name, (session, count) in sessions.items():
        if count:
            step(session, count)
        sequence = 0 if session.batch is None else 1
        save_session(storage, name, session, fingerprint, sequence=sequence)
        facts["sessions"][name] = saved(session)
    return facts


def saved(session: Session, *, aux: Sequence[Aux] = ()) -> dict[str, Any]:
    """What a reader of a saved session must find: its cursors as well."""
    firsts = {name: cursor.origin_logical for name, cursor in session.cursors.items()}
    cursors = {name: list(cursor.as_tuple()) for name, cursor in session.cursors.items()}
    return {**expected(session, firsts, aux=aux), "cursors": cursors}


PACKS = {"windows": make_windows, "rows": make_rows}


def main() -> int:
    """Write what is not there; refuse to touch what is."""
    GOLDEN.mkdir(exist_ok=True)
    digests = GOLDEN / "digests.json"
    there = [str(path) for path in (digests, *(GOLDEN / name for name in PACKS)) if path.exists()]
    if there:
        print(f"not written, golden packs are never replaced: {', '.join(there)}")
        return 1
    facts = {}
    for name, make in PACKS.items():
        try:
            facts[name] = make(open_root(GOLDEN / name, create=True))
        except KVPlaneError as error:
            print(f"{name}: {error}")
            return 1
        facts[name]["files"] = {
            str(path.relative_to(GOLDEN / name)): blake3(path.read_bytes()).hexdigest()
            for path in sorted((GOLDEN / name).rglob("*"))
            if path.is_file()
        }
    digests.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
