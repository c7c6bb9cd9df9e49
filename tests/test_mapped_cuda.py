"""The bookkeeping of a GPU's pages, on a driver that this process's own pages play."""

import gc
import random

import pytest
import torch

from kvplane import KVStore, Layout
from kvplane.errors import MemoryUnavailable
from kvplane.geometry import ModelGeometry
from kvplane.memory import mapped_cuda
from kvplane.memory.choose import Choice
from paged_driver import PagedDriver

PAGE = PagedDriver.page_nbytes
CPU = torch.device("cpu")


def arena(driver):
    return mapped_cuda.CudaMappedBackend(CPU, driver).arena()


def written(span, first, content):
    """Bytes into a span that were made writable before."""
    span.back([range(first, first + len(content))])
    span.tensor()[first : first + len(content)] = torch.tensor(list(content), dtype=torch.uint8)


def read(span, first, count):
    return bytes(span.tensor()[first : first + count].tolist())


def test_a_rings_bytes_follow_themselves_and_are_zero_until_written():
    span = arena(PagedDriver()).reserve(2 * PAGE, ring=True)
    written(span, 2 * PAGE - 2, b"ab")
    written(span, 0, b"cd")

    assert b"abcd" == read(span, 2 * PAGE - 2, 4)
    assert b"\0" * 10 == read(span, 2, 10)
    assert len(span.tensor()) == 4 * PAGE


def test_a_plane_takes_pages_as_they_are_needed_and_one_ahead():
    driver = PagedDriver()
    span = arena(driver).reserve(10 * PAGE, ring=False)
    assert (0, 0) == span.counts()
    written(span, 0, b"a")
    assert (PAGE, 0) == span.counts()
    written(span, PAGE - PAGE // 200, b"b")
    assert (2 * PAGE, 0) == span.counts()
    written(span, 5 * PAGE, b"c")

    assert (3 * PAGE, 0) == span.counts()
    assert b"a" == read(span, 0, 1)
    assert 0xFF == read(span, 4 * PAGE, 1)[0]
    assert driver.waits == 0


def test_planes_of_a_session_take_their_next_page_in_turn():
    driver = PagedDriver()
    home = arena(driver)
    spans = [home.reserve(4 * PAGE, ring=False) for _ in range(13)]
    row = PAGE // 256
    most = 0
    for number in range(255):
        before = driver.num_pages
        for span in spans:
            span.back([range(number * row, (number + 1) * row)])
        if number:
            most = max(most, driver.num_pages - before)

    assert driver.num_pages == 26
    assert most == 1


def test_forks_share_pages_until_one_side_writes():
    driver = PagedDriver()
    home = arena(driver)
    span = home.reserve(4 * PAGE, ring=False)
    written(span, 0, b"x" * (2 * PAGE + 5))
    forked = home.fork().reserve(4 * PAGE, ring=False)

    assert forked.share(span, [range(2 * PAGE + 5)])
    assert (3 * PAGE, 3 * PAGE) == span.counts() == forked.counts()
    assert home.held()[1] == 3 * PAGE
    driver.queued = True
    written(forked, 2 * PAGE + 5, b"f")
    driver.queued = True
    written(span, 2 * PAGE + 5, b"s")

    assert b"xf\0" == read(forked, 2 * PAGE + 4, 3)
    assert b"xs\0" == read(span, 2 * PAGE + 4, 3)
    assert (3 * PAGE, 2 * PAGE) == span.counts() == forked.counts()
    assert driver.num_pages == 4


def test_many_pages_at_once_are_few_allocations_but_the_last_is_one_by_itself():
    driver = PagedDriver()
    home = arena(driver)
    span = home.reserve(40 * PAGE, ring=False)
    written(span, 0, bytes(range(200)) * 400)
    assert 20 == driver.num_pages
    assert [16, 2, 1, 1] == list(driver.handles.values())
    forked = home.fork().reserve(40 * PAGE, ring=False)
    forked.share(span, [range(20 * PAGE)])
    driver.queued = True
    # a rewound fork writes inside a large one: it is copied whole
    written(forked, 9 * PAGE + 5, b"new")

    assert 36 == driver.num_pages
    assert read(span, 9 * PAGE, 20) == read(forked, 9 * PAGE, 5) + read(span, 9 * PAGE + 5, 15)
    assert b"new" == read(forked, 9 * PAGE + 5, 3)
    assert read(span, 16 * PAGE - 9, 9) == read(forked, 16 * PAGE - 9, 9)
    assert (20 * PAGE, 4 * PAGE) == forked.counts()


def test_rings_and_strangers_pages_are_not_shared():
    driver = PagedDriver()
    home = arena(driver)
    ring = home.reserve(PAGE, ring=True)
    written(ring, 0, b"r")
    full = home.reserve(2 * PAGE, ring=False)

    assert not home.fork().reserve(PAGE, ring=True).share(ring, [range(1)])
    assert not arena(driver).reserve(2 * PAGE, ring=False).share(full, [range(1)])
    assert not full.share(home.reserve(10, ring=False), [range(1)])


def test_what_a_hold_keeps_comes_back():
    driver = PagedDriver()
    span = arena(driver).reserve(3 * PAGE, ring=False)
    written(span, 0, b"old")
    hold = span.hold([range(3)])
    written(span, 0, b"new")
    written(span, PAGE, b"more")
    assert b"new" == read(span, 0, 3)
    driver.queued = True
    span.show(hold)

    assert b"old" == read(span, 0, 3)
    assert b"more" == read(span, PAGE, 4)
    assert driver.num_pages == 2
    span.close()
    assert driver.num_pages == 1
    del hold
    gc.collect()
    assert driver.handles == {}


@pytest.mark.parametrize("how", ["close", "collect"])
def test_everything_is_returned_and_tensors_that_are_left_read_zeros(how):
    driver = PagedDriver()
    home = arena(driver)
    spans = [home.reserve(2 * PAGE, ring=True), home.reserve(3 * PAGE, ring=False)]
    for span in spans:
        written(span, 0, b"abc")
    left = [span.tensor() for span in spans]
    driver.queued = True
    if how == "close":
        home.release()
        home.release()
    else:
        del home, spans, span
        gc.collect()

    assert driver.handles == {}
    assert [0, 0] == [int(tensor[0]) for tensor in left]
    assert int(left[0][2 * PAGE]) == 0


def test_nothing_goes_while_a_graph_is_captured():
    driver = PagedDriver()
    home = arena(driver)
    span = home.reserve(2 * PAGE, ring=False)
    written(span, 0, b"abc")
    driver.busy = True
    home.release()
    assert driver.num_pages == 1
    driver.busy = False
    home.held()

    assert driver.handles == {}


def test_pages_that_cannot_be_had_leave_the_span_as_it_was():
    driver = PagedDriver(limit=2)
    home = arena(driver)
    span = home.reserve(6 * PAGE, ring=False)
    written(span, 0, b"a")
    with pytest.raises(MemoryUnavailable):
        span.back([range(PAGE, 4 * PAGE)])

    assert (PAGE, 0) == span.counts()
    forked = home.fork().reserve(6 * PAGE, ring=False)
    forked.share(span, [range(1)])
    last = home.fork().reserve(PAGE, ring=False)
    written(last, 0, b"z")
    with pytest.raises(MemoryUnavailable):
        written(forked, 0, b"b")
    assert b"a" == read(forked, 0, 1) == read(span, 0, 1)


def test_a_copy_that_cannot_be_mapped_leaves_the_shared_page_where_it_was(monkeypatch):
    driver = PagedDriver()
    home = arena(driver)
    span = home.reserve(2 * PAGE, ring=False)
    written(span, 0, b"a")
    forked = home.fork().reserve(2 * PAGE, ring=False)
    forked.share(span, [range(1)])
    addresses, times = forked._range, []

    def refused(first, shown):
        times.append(first)
        if len(times) == 1:
            raise MemoryUnavailable("no mapping left")
        type(addresses).map(addresses, first, shown)

    monkeypatch.setattr(addresses, "map", refused)
    with pytest.raises(MemoryUnavailable):
        written(forked, 0, b"b")

    assert b"a" == read(forked, 0, 1) == read(span, 0, 1)
    assert 1 == driver.num_pages
    written(forked, 0, b"b")
    assert (b"a", b"b") == (read(span, 0, 1), read(forked, 0, 1))


def test_a_page_ahead_that_cannot_be_had_is_no_error_yet():
    driver = PagedDriver(limit=1)
    span = arena(driver).reserve(2 * PAGE, ring=False)
    written(span, PAGE - 1, b"a")

    assert (PAGE, 0) == span.counts()
    with pytest.raises(MemoryUnavailable):
        span.back([range(PAGE, PAGE + 1)])


def test_planes_that_fill_no_page_are_whole_tensors_and_counted():
    home = arena(PagedDriver())
    small = home.reserve(100, ring=True)

    assert (100, 0) == small.counts()
    assert home.held()[1] == 100
    assert not small.unrolled
    assert not home.reserve(PAGE + 1, ring=True).unrolled
    home.release()
    assert home.held()[1] == 0


def test_discarded_bytes_are_zero_again():
    driver = PagedDriver()
    span = arena(driver).reserve(2 * PAGE, ring=True)
    written(span, 0, b"abc")
    driver.queued = True
    span.discard()
    assert driver.handles == {}
    written(span, 1, b"x")

    assert b"\0x\0" == read(span, 0, 3)


def test_a_store_on_such_memory_holds_what_one_on_the_heap_holds(monkeypatch):
    # rings of exactly a page, full planes of 16
    geometry = ModelGeometry.uniform(
        ["sliding_attention", "full_attention"],
        sliding_window=32,
        num_kv_heads=2,
        head_dim=16,
        dtype="float16",
    )
    driver = PagedDriver()
    options = {
        "max_context": 512,
        "layout": {"full_attention": Layout.TOKEN_MAJOR},
    }
    heap = KVStore(geometry, memory="heap", **options)
    backend = mapped_cuda.CudaMappedBackend(CPU, driver)
    monkeypatch.setattr("kvplane.store.choose", lambda *_: Choice(backend, "a test"))
    mapped = KVStore(geometry, **options)
    assert mapped.describe().memory["backend"] == "mapped"
    choices = random.Random(5)
    pairs = [(heap.open(), mapped.open())]
    for number in range(60):
        driver.queued = True
        one_act(choices, pairs, number)
        for first, second in pairs:
            assert rows_of(first) == rows_of(second)
    held = mapped.memory()
    assert held.pages_held == driver.num_pages * PAGE
    mapped.close()
    del pairs, first, second
    gc.collect()

    assert driver.handles == {}


def one_act(choices, pairs, number):
    """Something that sessions do, done to both of a pair."""
    place = choices.randrange(len(pairs))
    pair = pairs[place]
    act = choices.choice(["step", "step", "step", "fork", "return", "close"])
    if act == "fork" and len(pairs) < 4:
        pairs.append(tuple(session.fork() for session in pair))
    elif act == "close" and len(pairs) > 1:
        for session in pairs.pop(place):
            session.close()
    elif pair[0].position < 400:
        kept = [session.checkpoint() for session in pair]
        stepped(pair, choices.choice([1, 1, 7, 40]), number)
        if act == "return":
            for session, checkpoint in zip(pair, kept, strict=True):
                session.return_to(checkpoint)


def stepped(pair, count, seed):
    """The same rows into both."""
    for session in pair:
        generator = torch.Generator().manual_seed(seed)
        with session.step(count) as step:
            for layer in range(2):
                key = torch.randn(count, 2, 16, generator=generator).half()
                step.write(layer, key, -key)


def rows_of(session):
    """Bits of all live rows."""
    bits = []
    for layer in range(2):
        live = session.live(layer)
        spans = session.spans(layer, live.start, live.stop)
        bits += [
            torch.cat(parts).view(torch.int16).flatten().tolist()
            for parts in zip(*spans, strict=True)
        ]
    return bits
