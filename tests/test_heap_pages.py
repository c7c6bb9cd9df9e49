"""Large pages for rows that come many at once: faster, and no byte more is held."""

import mmap
import struct
import weakref
from pathlib import Path

import pytest
import torch

from kvplane import KVStore, Layout, ModelGeometry
from kvplane.memory import heap

MIB = 1 << 20


def held(plane):
    """Bytes of a plane's pages that the system gave, in its own words."""
    first = plane.span.tensor().data_ptr() // mmap.PAGESIZE
    last = (plane.span.tensor().data_ptr() + plane.span.nbytes - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = struct.unpack(f"={last + 1 - first}Q", pages.read(8 * (last + 1 - first)))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def mappings(plane):
    """A plane's mappings in the system's list: its bytes in each, and what the list says."""
    start = plane.span.tensor().data_ptr()
    stop = start + plane.span.nbytes
    found = []
    inside = 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = min(end, stop) - max(begin, start)
            found += [(inside, {})] if inside > 0 else []
        elif inside > 0:
            found[-1][1][name] = rest
    return found


def asked(plane):
    """Bytes for which large pages were asked."""
    return sum(nbytes for nbytes, says in mappings(plane) if "hg" in says["VmFlags:"])


def store(layout, max_context=15_001):
    geometry = ModelGeometry.uniform(
        ["full_attention"], sliding_window=None, num_kv_heads=2, head_dim=128, dtype="float16"
    )
    return KVStore(
        geometry, max_context=max_context, memory="heap", layout={"full_attention": layout}
    )


def built(target, num_tokens):
    """A session whose rows come in pieces of 512, as from a pack."""
    name = target.geometry.groups[0].id
    builder = target.builder({name: (target.max_context, num_tokens, 0, 0)})
    rows = torch.ones(1, 512, 2, 128, dtype=torch.float16)
    for first in range(0, num_tokens, 512):
        count = min(512, num_tokens - first)
        builder.write(0, first, rows[:, :count], rows[:, :count])
    return builder.finish()


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("num_tokens", [1, 4_095, 5_000, 9_001])
def test_what_is_held_is_what_was_written_to_the_page(layout, num_tokens):
    session = built(store(layout), num_tokens)
    plane = session.planes[0]
    pages = {
        page
        for part in plane.shape.byte_ranges(range(num_tokens))
        for page in range(part.start // mmap.PAGESIZE, -(-part.stop // mmap.PAGESIZE))
    }

    assert len(pages) * mmap.PAGESIZE == held(plane)


def test_whole_large_pages_are_asked_for_and_no_others():
    plane = built(store(Layout.TOKEN_MAJOR), 8_192 + 100).planes[0]
    size = heap.LARGE_PAGE_NBYTES
    start = plane.span.tensor().data_ptr()
    stop = start + (8_192 + 100) * 1024
    wanted = 0 if size is None else (stop // size - -(-start // size)) * size

    assert wanted == asked(plane)


def test_a_session_that_grows_token_by_token_has_none():
    session = store(Layout.TOKEN_MAJOR).open()
    rows = torch.ones(3, 2, 128, dtype=torch.float16)
    for _ in range(3):
        with session.step(3) as step:
            step.write(0, rows, rows)

    plane = session.planes[0]

    assert 3 * mmap.PAGESIZE == held(plane)
    assert {"0"} == {says["AnonHugePages:"][0] for _, says in mappings(plane)}


@pytest.mark.parametrize("size", [None, 2 * MIB])
def test_a_system_without_large_pages_loses_nothing(size, monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(heap, "LARGE_PAGE_NBYTES", size)
    target = store(Layout.TOKEN_MAJOR)
    if size is not None:
        # a span's mapping cannot be patched: one that refuses takes its place
        class Refusing:
            madvise = staticmethod(refuse)

        reserve = heap.HeapArena.reserve

        def refusing(self, nbytes, *, ring):
            span = reserve(self, nbytes, ring=ring)
            span._mapping = Refusing()
            return span

        monkeypatch.setattr(heap.HeapArena, "reserve", refusing)
    session = built(target, 9_001)

    assert 9_001 == session.position
    assert bool((session.spans(0, 0, 9_001)[0][0] == 1).all())


def test_a_size_that_cannot_be_read_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(heap, "LARGE_PAGE", tmp_path / "none")

    assert heap._large_page_nbytes() is None
    (tmp_path / "words").write_text("what", encoding="ascii")
    monkeypatch.setattr(heap, "LARGE_PAGE", tmp_path / "words")

    assert heap._large_page_nbytes() is None


def test_a_ring_of_one_large_page_begins_at_one():
    geometry = ModelGeometry.uniform(
        ["sliding_attention"], sliding_window=2048, num_kv_heads=2, head_dim=128, dtype="float16"
    )
    target = KVStore(geometry, max_context=15_001, memory="heap")
    name = target.geometry.groups[0].id
    builder = target.builder({name: (2048, 2048, 0, 0)})
    rows = torch.ones(1, 2048, 2, 128, dtype=torch.float16)
    builder.write(0, 0, rows, rows)
    plane = builder.finish().planes[0]

    assert 0 == plane.span.tensor().data_ptr() % heap.LARGE_PAGE_NBYTES
    assert plane.span.nbytes == asked(plane) == held(plane)


@pytest.mark.parametrize("num_tokens", [2047, 5000])
def test_rows_kept_aside_by_a_chunk_go_back_to_the_system_with_it(num_tokens, monkeypatch):
    geometry = ModelGeometry.uniform(
        ["sliding_attention"], sliding_window=2048, num_kv_heads=2, head_dim=128, dtype="float16"
    )
    session = KVStore(geometry, max_context=15_001, memory="heap").open()
    mappings = []
    lazy_zeros = heap._lazy_zeros

    def watched(nbytes, *, align):
        mapping, first = lazy_zeros(nbytes, align=align)
        mappings.append(weakref.ref(mapping))
        return mapping, first

    monkeypatch.setattr(heap, "_lazy_zeros", watched)
    rows = torch.ones(num_tokens, 2, 128, dtype=torch.float16)
    for _ in range(2):
        with session.step(num_tokens, speculative=True) as step:
            step.write(0, rows, rows)
            step.commit(num_tokens)

    assert mappings
    assert not any(mapping() for mapping in mappings)


def test_few_rows_kept_aside_come_from_the_allocator():
    like = torch.ones(3, 2, dtype=torch.float16)

    assert (4, 2) == heap.scratch(like, (4, 2)).shape
    assert torch.float16 == heap.scratch(like, (heap.SCRATCH_NBYTES, 2)).dtype
