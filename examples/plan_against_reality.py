"""A plan made before anything is allocated, what the store then reports, and what Linux says.

The model is Muse Glimmer 30B: 39 sliding layers with rings of 2,048 rows, 13 full ones.
"""

from pathlib import Path

import torch

from kvplane import KVStore, ModelGeometry, footprint

CONTEXT = 4096
geometry = ModelGeometry.preset("muse-glimmer-30b")
store = KVStore(geometry, max_context=131_072)
backend = store.memory_choice.backend
plan = footprint(
    geometry,
    context=CONTEXT,
    max_context=store.max_context,
    step=256,
    page_nbytes=backend.page_nbytes,
    ring_page_nbytes=backend.ring_page_nbytes,
).session


def pss(session):
    """Bytes of memory behind a session's planes: what is mapped twice counts once."""
    bases = [plane.key.untyped_storage() for plane in session.planes.values()]
    ranges = [range(base.data_ptr(), base.data_ptr() + base.nbytes()) for base in bases]
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if name == "Pss:" and ours:
            total += 1024 * int(rest[0])
        elif not name.endswith(":"):
            first, stop = (int(address, 16) for address in name.split("-"))
            ours = any(first < part.stop and part.start < stop for part in ranges)
    return total


rows = torch.ones(256, 2, 128, dtype=torch.float16)
with store.open() as session:
    while session.position < CONTEXT:
        with session.step(256) as step:
            for layer in session.planes:
                step.write(layer, rows, rows)
    held = store.memory().total
    measured = pss(session)
print(f"{'':14} {'planned':>15} {'reported':>15} {'measured':>15}")
print(f"{'reserved':14} {plan.reserved:15,} {held.reserved:15,}")
print(f"{'rows held':14} {plan.rows_held:15,} {held.rows_held:15,}")
print(f"{'pages held':14} {plan.pages_held:15,} {held.pages_held:15,} {measured:15,}")
told = (held.reserved, held.rows_held, held.pages_held)
same = told == (plan.reserved, plan.rows_held, plan.pages_held) and measured == plan.pages_held
print("all equal, to the byte:", same)
raise SystemExit(not same)
