"""What mapped memory gives back, and what a tensor shows that outlives what it was a part of."""

import gc
import os
from pathlib import Path

import pytest
import torch

import tiny
from kvplane.errors import MemoryUnavailable, SnapshotMismatch
from kvplane.memory import address, mapped_cpu
from mapped_child import run

NUM_SESSIONS = 10_000
PAGE_ROWS = {"head_dim": 512, "memory": "mapped"}


def used():
    """Descriptors, mappings and bytes of this process."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    pss = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    mappings = Path("/proc/self/maps").read_text(encoding="ascii").count("\n")
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), mappings, 1024 * pss


def closed(session, fork):
    session.close()
    fork.close()


def closed_in_turn(session, fork):
    fork.close()
    session.close()


def dropped(session, fork):
    del session, fork


def torn(session, fork):
    """Held by a cycle, with a step open, until they are collected."""
    step = fork.step(1)
    step.__enter__()
    session.ring = session


ENDS = (closed, closed_in_turn, dropped, torn)


def many_lives():
    """Sessions that are opened, forked and dropped, half of them forks of one that stays."""
    store = tiny.store(4, None, memory="mapped")
    parent = tiny.filled(store.open(), 7)

    def lives(count):
        for number in range(count):
            session = parent.fork() if number % 2 else store.open()
            tiny.put(session, range(session.position, session.position + 3))
            fork = session.fork()
            tiny.put(fork, [fork.position])
            kept = session.checkpoint()
            ENDS[number // 2 % len(ENDS)](session, fork)
            del session, fork, kept

    lives(500)
    descriptors, mappings, nbytes = used()
    file_nbytes = os.fstat(parent.arena.held()[0]).st_size
    lives(NUM_SESSIONS)
    after = used()

    assert descriptors == after[0]
    # a few of the interpreter's own come and go
    assert abs(after[1] - mappings) <= 8
    assert after[2] - nbytes < 4 << 20
    # as many more places as sessions that wait for the collector together
    assert os.fstat(parent.arena.held()[0]).st_size - file_nbytes < 1 << 20
    assert [parent] == store.sessions
    assert store.account.held == (4 + 7) * 16
    assert list(range(7)) == tiny.held(parent, 1)


def test_ten_thousand_sessions_opened_forked_and_dropped_leave_nothing():
    # what other tests leave to the allocator is not theirs
    run("import test_mapped_lifetime; test_mapped_lifetime.many_lives()")


def test_a_chain_of_forks_whose_parents_are_closed_holds_one_history():
    store = tiny.store(4, None, max_context=4096, **PAGE_ROWS)
    session = tiny.filled(store.open(), 8)
    for position in range(8, 200):
        fork = session.fork()
        session.close()
        session = fork
        tiny.put(session, [position])
        gc.collect() if position % 100 == 0 else None
    rows = session.position * 4096

    assert list(range(200)) == tiny.held(session, 1)
    assert rows + 4 * 4096 == store.memory().pages_held
    # a ring once, and runs of a history, whoever wrote them
    assert used()[1] < 4000


def test_what_a_session_held_goes_back_when_it_is_closed_collected_or_refused():
    store = tiny.store(4, None, max_context=4096, **PAGE_ROWS)
    snapshot = tiny.filled(store.open(), 9).snapshot()
    other = tiny.store(4, None, max_context=8, **PAGE_ROWS)
    limited = tiny.store(4, None, limit=1, **PAGE_ROWS)
    before = used()[:2]
    ends = {
        "closed": lambda: tiny.filled(store.open(), 9).close(),
        "collected": lambda: tiny.filled(store.open(), 9) and None,
        "left": lambda: store.open().__exit__(None, None, None),
        "refused by the limit": lambda: refused(MemoryUnavailable, limited.open),
        "refused by a snapshot": lambda: refused(SnapshotMismatch, other.restore, snapshot),
        "given up": lambda: store.builder(snapshot.cursors).abandon(),
        "not finished": lambda: refused(SnapshotMismatch, store.builder(snapshot.cursors).finish),
    }
    for what, end in ends.items():
        end()

        assert (what, before) == (what, used()[:2])
    assert 0 == store.account.held


def refused(error, call, *arguments):
    with pytest.raises(error):
        call(*arguments)


# tensors that are left over


def views_of(session, position):
    """Views of a ring and of a full plane, of a step that is over."""
    with session.step([position]) as step:
        tiny.write(step, session, [position])
        views = [step.view(layer).spans for layer in (0, 1)]
    return [tensor for spans in views for span in spans for tensor in span]


def ended(session, how):
    """The end of a session, after which only its views are left."""
    if how == "the next step":
        tiny.put(session, [session.position])
    elif how == "a rewind and other tokens":
        session.rewind(session.position - 1)
        tiny.put(session, [70])
    elif how == "a reset":
        session.reset()
    elif how == "its close":
        session.close()
    elif how == "its store's close":
        session.store.close()
    elif how == "a fork's close":
        session.fork().close()


ENDINGS = (
    "the next step",
    "a rewind and other tokens",
    "a reset",
    "its close",
    "its store's close",
    "a fork's close",
    "its collection",
)


@pytest.mark.parametrize("memory", ["heap", "mapped"])
@pytest.mark.parametrize("how", ENDINGS)
def test_a_view_can_be_read_and_written_after(how, memory):
    session = tiny.filled(tiny.store(4, None, head_dim=512, memory=memory).open([]), 9)
    twin = session.fork()
    tensors = views_of(session, 9)
    ended(session, how)
    if how == "its collection":
        del session
    gc.collect()

    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    if how in {"its close", "its store's close", "its collection", "a reset"}:
        # in mapped memory it shows zeros; on the heap what was there
        zeros = [not tensor.any() for tensor in tensors]

        assert [memory == "mapped" or how == "a reset"] * len(tensors) == zeros
        # and is nobody's any more
        for tensor in tensors:
            tensor.fill_(7.0)
    if how != "its store's close":
        assert [5, 6, 7, 8] == tiny.held(twin, 0)
        assert list(range(9)) == tiny.held(twin, 1)


def test_a_view_that_is_left_over_never_shows_another_sessions_rows():
    store = tiny.store(4, None, **PAGE_ROWS)
    parent = tiny.filled(store.open([]), 9)
    fork = parent.fork()
    tensors = views_of(fork, 9)
    fork.close()
    others = [parent.fork() for _ in range(3)]
    for place, other in enumerate(others):
        tiny.put(other, [50 + place])

    assert not any(tensor.any() for tensor in tensors)
    for tensor in tensors:
        tensor.fill_(7.0)

    assert [[6, 7, 8, 50 + place] for place in range(3)] == [tiny.held(o, 0) for o in others]
    assert list(range(9)) == tiny.held(parent, 1)


def test_where_zeros_cannot_be_put_a_view_is_read_only_and_its_pages_are_nobodys(monkeypatch):
    libc = address._LIBC

    class Refusing:
        def mmap(self, *_arguments):
            return address._MAP_FAILED

        def __getattr__(self, name):
            return getattr(libc, name)

    store = tiny.store(4, None, **PAGE_ROWS)
    parent = tiny.filled(store.open([]), 9)
    fork = parent.fork()
    tensors = views_of(fork, 9)
    with monkeypatch.context() as patch:
        patch.setattr(address, "_LIBC", Refusing())
        fork.close()
    tiny.filled(parent.fork(), 14)
    tiny.filled(store.open(), 14)

    # a shared page shows what its owners have, the fork's own nothing
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert not any(tensor[-1].any() for tensor in tensors)
    assert list(range(9)) == tiny.held(parent, 1)


def test_a_tensor_keeps_its_addresses_when_everything_else_is_gone():
    said = run("""
        session = tiny.filled(tiny.store(4, None, head_dim=512, memory="mapped").open(), 9)
        key = session.spans(1, 0, 9)[0][0]
        maps = lambda: sum("kvplane" in line or hex(key.data_ptr())[2:] in line
                           for line in open("/proc/self/maps"))
        check(maps() > 0, "not mapped")
        session.store.close()
        del session
        gc.collect()
        check(maps() == 1, "no longer mapped")
        check(not key.any(), "not zeros")
        del key
        gc.collect()
        print(sum("kvplane" in line for line in open("/proc/self/maps")))
    """)

    assert "0\n" == said


# another process


def test_a_child_of_the_process_can_not_change_a_session_and_takes_nothing_with_it():
    said = run("""
        store = tiny.store(4, None, head_dim=512, memory="mapped")
        session = tiny.filled(store.open([]), 9)
        twin = session.fork()
        garbage = [twin.fork()]
        garbage.append(garbage)
        child = os.fork()
        if child == 0:
            for call in (lambda: tiny.put(session, [9]), session.fork, session.checkpoint):
                check("belongs to the process" in refused(call), "not refused")
            del garbage
            gc.collect()
            twin.close()
            session.close()
            mine = tiny.filled(tiny.store(4, None, memory="mapped").open(), 6)
            check(tiny.held(mine, 0) == [2, 3, 4, 5], "rows of the child")
            os._exit(0)
        check(os.waitpid(child, 0)[1] == 0, "the child")
        check(tiny.held(session, 1) == list(range(9)) == tiny.held(twin, 1), "rows")
        check(tiny.held(session, 0) == [5, 6, 7, 8] == tiny.held(twin, 0), "rows")
        tiny.put(session, [9])
        print(tiny.held(session, 0))
    """)

    assert "[6, 7, 8, 9]\n" == said


# threads, and what is let go in the middle of a call


def test_pages_let_go_in_the_middle_of_a_call_are_gone_after_it():
    store = tiny.store(4, None, **PAGE_ROWS)
    session = tiny.filled(store.open([]), 9)
    file = session.planes[1].span.file
    kept = [session.checkpoint()]
    session.rewind(8)

    def shared():
        return int((file.owners > 1).sum())

    def fails():
        with file.enter():
            before = shared()
            # a collector may run anywhere
            kept.clear()

            assert 0 < before == shared()
            raise KeyError

    with pytest.raises(KeyError):
        fails()

    assert 0 == shared()


def test_mapped_memory_is_tried_out_before_it_is_chosen(monkeypatch):
    mapped_cpu._try_out.cache_clear()
    cpu = torch.device("cpu")

    def no_file(*_arguments):
        raise OSError(38, "not here")

    with monkeypatch.context() as patch:
        patch.setattr("os.memfd_create", no_file)

        assert "is refused by the system: a memory file of 0 bytes" in mapped_cpu.unavailable(cpu)
    with monkeypatch.context() as patch:
        patch.setattr(mapped_cpu.MappedSpan, "_map", lambda *_: None)
        monkeypatch.setattr(mapped_cpu.MappedSpan, "back", lambda *_: None)
        patch.setattr(
            mapped_cpu.MappedSpan, "tensor", lambda *_: torch.zeros(8192, dtype=torch.uint8)
        )

        assert "one page at two addresses is two" in mapped_cpu.unavailable(cpu)
    monkeypatch.undo()

    assert mapped_cpu.unavailable(cpu) is None
