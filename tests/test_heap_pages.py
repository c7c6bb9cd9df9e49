"""Large pages for rows that come many at once: faster, and no byte more is held."""

import mmap
from pathlib import Path

import pytest
import torch

from kvplane import KVStore, Layout, ModelGeometry
from kvplane.memory import heap

MIB = 1 << 20


def held(plane, what="Rss"):
    """Bytes of a plane's pages that the system gave, in its own words."""
    start = plane.span.tensor().data_ptr()
    stop = start + plane.span.nbytes
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, dash, rest = line.partition("-")
        if dash and " " in rest and not first.endswith(":"):
            begin, end = int(first, 16), int(rest.split()[0], 16)
            inside = start <= begin and end <= stop + mmap.PAGESIZE
        elif inside and line.startswith(f"{what}:"):
            total += int(line.split()[1]) * 1024
    return total


def asked(plane):
    """Bytes for which large pages were asked."""
    start = plane.span.tensor().data_ptr()
    total, size = 0, 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, dash, rest = line.partition("-")
        if dash and " " in rest and not first.endswith(":"):
            begin, end = int(first, 16), int(rest.split()[0], 16)
            size = end - begin if start <= begin < start + plane.span.nbytes else 0
        elif line.startswith("VmFlags:") and "hg" in line.split():
            total += size
    return total


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

    assert (0, 3 * mmap.PAGESIZE) == (
        held(session.planes[0], "AnonHugePages"),
        held(session.planes[0]),
    )


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
