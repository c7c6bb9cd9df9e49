"""What the system says a store holds is what its plan says, and appending allocates nothing."""

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from kvplane import KVStore, ModelGeometry, footprint

pytestmark = pytest.mark.usefixtures("memory")

MIB = 1 << 20


def pss_nbytes(*sessions):
    """Bytes of memory behind the sessions' planes, each page once however often it is mapped."""
    ranges = [
        (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        for session in sessions
        for plane in session.planes.values()
        for storage in [plane.key.untyped_storage()]
    ]
    if any(session.store.memory_choice.backend.name == "heap" for session in sessions):
        # a mapping of the heap joins its neighbours: pages are counted, not mappings
        return sum(map(present_nbytes, ranges))
    total = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if name == "Pss:" and ours:
            total += int(rest[0]) * 1024
        elif "-" in name and not name.endswith(":"):
            first, stop = (int(address, 16) for address in name.split("-"))
            ours = any(first < end and begin < stop for begin, end in ranges)
    return total


def present_nbytes(addresses):
    """Bytes of the private pages that are there, in memory or swapped out."""
    first, stop = addresses[0] // mmap.PAGESIZE, -(-addresses[1] // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (stop - first)), dtype=np.uint64)
    return int((entries >> np.uint64(62) != 0).sum()) * mmap.PAGESIZE


def all_nbytes():
    """Bytes of memory of the whole process."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def wide(num_layers=4, window=256):
    """Layers of 4,096 bytes a row: a ring is whole pages, a full plane grows by one a token."""
    return ModelGeometry.uniform(
        ["sliding_attention", "full_attention"] * (num_layers // 2),
        sliding_window=window,
        num_kv_heads=4,
        head_dim=256,
        dtype="float16",
    )


def taken(session, num_tokens, rows):
    """Tokens in steps of 64."""
    for _ in range(num_tokens // 64):
        with session.step(64) as step:
            for layer in range(len(session.geometry.layers)):
                step.write(layer, rows, rows)


@pytest.mark.parametrize("sessions", [1, 3])
def test_pss_is_the_pages_of_the_plan(memory, sessions):
    geometry = wide()
    store = KVStore(geometry, max_context=65_536, memory=memory)
    rows = torch.ones(64, 4, 256, dtype=torch.float16)
    opened = [store.open() for _ in range(sessions)]

    # addresses, not memory
    assert 0 == pss_nbytes(*opened)

    for context in (64, 1024, 4096):
        for session in opened:
            taken(session, context - session.position, rows)
        plan = footprint(
            geometry,
            context=context,
            sessions=sessions,
            max_context=65_536,
            page_nbytes=store.memory_choice.backend.page_nbytes,
            ring_page_nbytes=store.memory_choice.backend.ring_page_nbytes,
        )

        assert plan.total.pages_held == store.memory().pages_held == pss_nbytes(*opened)


def test_memory_of_a_neighbour_is_not_a_planes():
    # two stores' planes of the heap lie side by side, in one mapping
    stores = [KVStore(wide(), max_context=65_536, memory="heap") for _ in range(8)]
    opened = [store.open() for store in stores]
    rows = torch.ones(64, 4, 256, dtype=torch.float16)
    for session in opened[::2]:
        taken(session, 64, rows)

    assert 0 == pss_nbytes(*opened[1::2])
    assert sum(store.memory().pages_held for store in stores[::2]) == pss_nbytes(*opened[::2])


def test_what_is_closed_goes_back_to_the_system(memory):
    store = KVStore(wide(), max_context=65_536, memory=memory)
    rows = torch.ones(64, 4, 256, dtype=torch.float16)
    session = store.open()
    gc.collect()
    before = all_nbytes()
    taken(session, 8192, rows)

    assert 64 * MIB < all_nbytes() - before

    session.close()
    del session
    gc.collect()

    assert 8 * MIB > all_nbytes() - before


def test_forks_in_mapped_memory_share_every_page():
    store = KVStore(wide(), max_context=65_536, memory="mapped")
    rows = torch.ones(64, 4, 256, dtype=torch.float16)
    session = store.open()
    taken(session, 2048, rows)
    alone = pss_nbytes(session)
    forks = [session.fork() for _ in range(4)]

    # pages of forks are faulted in when they are read
    for fork in forks:
        for layer in range(4):
            live = fork.live(layer)

            assert all(bool(key.all()) for key, _ in fork.spans(layer, live.start, live.stop))

    held = store.memory().pages_held

    assert alone == held
    # a fifth of a page, in whole KiB
    assert 0.995 < pss_nbytes(session, *forks) / held <= 1


def test_a_reset_gives_the_pages_back(memory):
    store = KVStore(wide(), max_context=65_536, memory=memory)
    session = store.open()
    taken(session, 2048, torch.ones(64, 4, 256, dtype=torch.float16))

    assert 16 * MIB < pss_nbytes(session)

    session.reset()

    assert 0 == pss_nbytes(session)


def test_memory_that_is_not_there_is_refused_and_nothing_is_left():
    store = tiny.store(4, None, max_context=1 << 44, heads=8, head_dim=1024)
    before = all_nbytes()
    with pytest.raises(MemoryError):
        store.open()

    assert 0 == store.account.held
    assert [] == store.sessions
    assert 8 * MIB > all_nbytes() - before


def test_a_ring_that_goes_round_for_ever_holds_what_it_held(memory):
    store = KVStore(wide(2, window=64), max_context=1 << 21, memory=memory)
    session = store.open()
    row = torch.ones(1, 4, 256, dtype=torch.float16)
    ring, full = store.geometry.groups
    builder = store.builder(
        {ring.id: (64, 64, 1 << 20, 5), full.id: (1 << 21, 64, 1 << 20, 0)},
        first_position=1 << 20,
    )
    rows = row.expand(64, -1, -1)[None]
    for layer in (0, 1):
        builder.write(layer, 1 << 20, rows, rows)
    session = builder.finish()
    pointers = [plane.key.data_ptr() for plane in session.planes.values()]
    held = store.memory().total.pages_held
    for _ in range(300):
        with session.step(1) as step:
            step.write(0, row, row)
            step.write(1, row, row)
    grown = store.memory().total.pages_held - held

    # eight heads of keys and values, 512 bytes a row each
    assert 8 * (-(-364 * 512 // 4096) - 64 * 512 // 4096) * 4096 == grown
    assert pointers == [plane.key.data_ptr() for plane in session.planes.values()]
    assert 64 == len(session.live(0))
