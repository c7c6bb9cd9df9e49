"""Limits of the system end in errors that name them; what was there before goes on."""

import errno
import subprocess

import pytest

import tiny
from kvplane.errors import MemoryUnavailable
from kvplane.memory import address
from mapped_child import run

# one page of 4,096 bytes a row of the ring
PAGE_ROWS = {"head_dim": 512, "memory": "mapped"}


def test_descriptors_that_run_out_refuse_a_session_and_a_closed_one_makes_room():
    said = run("""
        store = tiny.store(4, None, memory="mapped")
        first = tiny.filled(store.open(), 6)
        lower(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 5)
        opened = []
        print(refused(lambda: [opened.append(store.open()) for _ in range(99)]))
        check(3 < len(opened) < 9, len(opened))
        check(len(store.sessions) == 1 + len(opened), "a session is left over")
        # forks need no descriptor
        twin = first.fork()
        tiny.put_each(twin, [6, 7])
        check(tiny.held(twin, 1) == list(range(8)), "rows")
        opened.pop().close()
        gc.collect()
        store.open()
    """)

    assert "too many descriptors (ulimit -n) (EMFILE)" in said


FILL = """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def take_mappings(leave):
        "Neighbours that differ cannot be one mapping."
        limit = int(open("/proc/sys/vm/max_map_count").read())
        free = limit - sum(1 for _ in open("/proc/self/maps")) - leave
        filler = mmap.mmap(-1, (free + 2) * 4096)
        base = ctypes.addressof(ctypes.c_char.from_buffer(filler))
        for page in range(0, free - 1, 2):
            if libc.mprotect(base + page * 4096, 4096, mmap.PROT_READ):
                break
        return filler
"""


def test_mappings_that_run_out_refuse_whatever_needs_one_and_change_nothing():
    said = run(
        FILL
        + """
    store = tiny.store(4, None, None, head_dim=512, memory="mapped")
    session = tiny.filled(store.open([]), 9)
    twin = session.fork()
    kept = session.checkpoint()
    before, held = tiny.state(session), store.account.held
    view = twin.spans(1, 0, 9)
    filler = take_mappings(leave=0)
    print(refused(lambda: [store.open() for _ in range(9)]))
    print(refused(lambda: [session.fork() for _ in range(9)]))
    check(store.account.held == held, "bytes are left over")
    check(len(store.sessions) == 2, "a session is left over")
    # both need a copy of a shared page
    print(refused(lambda: tiny.put(session, [9])))
    check(tiny.same(before, tiny.state(session)), "the session changed")
    check(session.open_step is None, "a step is open")
    check(tiny.held(twin, 1) == list(range(9)), "the fork changed")
    twin.close()
    check(all(bool(key.isfinite().all()) for key, _ in view), "a view is not readable")
    libc.mprotect(ctypes.addressof(ctypes.c_char.from_buffer(filler)), len(filler), 3)
    tiny.put(session, [9])
    session.return_to(kept)
    check(tiny.held(session, 1) == list(range(9)), "rows")
    check(tiny.held(session.fork(), 0) == [5, 6, 7, 8], "rows")
    """
    )

    assert 3 == said.count("vm.max_map_count")


def test_address_space_that_runs_out_refuses_a_session():
    said = run("""
        store = tiny.store(4, None, max_context=1 << 34, memory="mapped")
        small = tiny.store(4, None, memory="mapped")
        lower(resource.RLIMIT_AS, 1 << 36)
        print(refused(store.open))
        check(store.account.held == 0 and store.sessions == [], "something is left over")
        check(tiny.held(tiny.filled(small.open(), 9), 0) == [5, 6, 7, 8], "rows")
    """)

    assert "reserving address space of 274877906944 bytes failed: no memory" in said


def test_a_file_that_may_not_grow_refuses_a_session():
    said = run("""
        store = tiny.store(4, None, max_context=1 << 16, memory="mapped")
        session = tiny.filled(store.open(), 9)
        lower(resource.RLIMIT_FSIZE, 1 << 20)
        print(refused(store.open))
        print(refused(session.fork))
        tiny.put(session, [9])
        check(tiny.held(session, 1) == list(range(10)), "rows")
    """)

    assert 2 == said.count("a file may not be that large (ulimit -f) (EFBIG)")


# a small file system of this process alone, where that may be made; else the call that fills it
MOUNTED = ("unshare", "--user", "--map-root-user", "--mount")
FULL = """
    import pathlib, subprocess
    if {mounted}:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", "/mnt"], check=True)
        made = iter(range(99))
        os.memfd_create = lambda *_: os.open(f"/mnt/{{next(made)}}", os.O_RDWR | os.O_CREAT)
    else:
        libc, room = address._LIBC, [32]
        class Small:
            def fallocate(self, fd, mode, offset, nbytes):
                pages = nbytes // 4096
                if not mode and pages > room[0]:
                    ctypes.set_errno({enospc})
                    return -1
                room[0] += pages if mode else -pages
                return libc.fallocate(fd, mode, offset, nbytes)
            def __getattr__(self, name):
                return getattr(libc, name)
        address._LIBC = Small()
    store = tiny.store(4, None, head_dim=512, memory="mapped")
    session = store.open([])
    print(refused(lambda: tiny.filled(session, 64)))
    position = session.position
    check(8 < position < 32, position)
    check(session.open_step is None, "a step is open")
    check(tiny.held(session, 1) == list(range(position)), "rows")
    check(tiny.held(session, 0) == list(range(position - 4, position)), "rows")
    session.rewind(position - 1)
    tiny.put(session, [position - 1])
    check(tiny.held(session, 1) == list(range(position)), "rows")
    # what holds nothing can be had, and refuses its first row that needs a page
    other = store.open()
    print(refused(lambda: tiny.filled(other, 64)))
    session.close()
"""


def may_mount():
    command = [*MOUNTED, "mount", "-t", "tmpfs", "-o", "size=128k", "none", "/mnt"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("real", [True, False])
def test_memory_that_is_full_refuses_the_step_before_a_row_is_written(real):
    # a store to a page that cannot be had would be a signal that ends the process
    mounted = real and may_mount()
    said = run(FULL.format(mounted=mounted, enospc=errno.ENOSPC), *(MOUNTED if mounted else ()))

    assert 2 == said.count("the memory file system is full (ENOSPC)")


def test_a_file_can_not_be_shrunk_under_the_rows_that_are_shown():
    # reading past the end of a file would be a signal that ends the process
    said = run("""
        session = tiny.filled(tiny.store(4, None, memory="mapped").open(), 9)
        try:
            os.truncate(f"/proc/self/fd/{session.arena.held()[0]}", 0)
        except PermissionError:
            print("refused")
        check(tiny.held(session, 1) == list(range(9)), "rows")
    """)

    assert "refused\n" == said


# limits that no process can be given: calls that fail on their own


class Failing:
    """The C library, one of whose calls fails at the nth time."""

    def __init__(self, name, nth, code):
        self._libc = address._LIBC
        self._name = name
        self.left = nth
        self._code = code

    def __getattr__(self, name):
        call = getattr(self._libc, name)
        if name != self._name:
            return call

        def counted(*arguments):
            self.left -= 1
            if self.left == -1:
                address.ctypes.set_errno(self._code)
                return address._MAP_FAILED if name == "mmap" else -1
            return call(*arguments)

        return counted


@pytest.mark.parametrize("nth", range(12))
def test_a_mapping_that_is_refused_at_any_call_leaves_a_session_as_it_was(monkeypatch, nth):
    store = tiny.store(4, None, **PAGE_ROWS)
    session = tiny.filled(store.open([]), 9)
    twin = session.fork()
    kept = session.checkpoint()
    tiny.put_each(session, [9, 10])
    before = tiny.state(session), tiny.state(twin)
    for call in (
        session.fork,
        store.open,
        lambda: tiny.put(twin, [70]),
        lambda: session.return_to(kept),
    ):
        monkeypatch.setattr(address, "_LIBC", Failing("mmap", nth, errno.ENOMEM))
        try:
            made = call()
        except MemoryUnavailable:
            monkeypatch.undo()

            assert tiny.same(before[0], tiny.state(session))
            assert tiny.same(before[1], tiny.state(twin))
            assert {session, twin} == set(store.sessions)
        else:
            monkeypatch.undo()
            if made is not None:
                made.close()
            before = tiny.state(session), tiny.state(twin)

    session.return_to(kept)

    assert list(range(9)) == tiny.held(session, 1)
    assert list(range(9)) == tiny.held(twin, 1)[:9]
    assert [5, 6, 7, 8] == tiny.held(session, 0)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EIO])
def test_a_call_that_is_interrupted_is_made_again(monkeypatch, code):
    libc = Failing("fallocate", 0, code)
    monkeypatch.setattr(address, "_LIBC", libc)
    store = tiny.store(4, None, **PAGE_ROWS)
    session = store.open()
    if code == errno.EIO:
        with pytest.raises(MemoryUnavailable, match=r"Input/output error \(EIO\)"):
            tiny.put(session, [0])

        assert 0 == session.position
        return

    def interrupted(*arguments):
        monkeypatch.undo()
        address.ctypes.set_errno(code)
        del arguments
        return -1

    monkeypatch.setattr(libc, "_name", "")
    monkeypatch.setattr(libc, "fallocate", interrupted, raising=False)
    tiny.put(session, [0])

    assert [0] == tiny.held(session, 0)
