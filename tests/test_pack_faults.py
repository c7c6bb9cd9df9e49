"""Saving and publishing with one system call failing, or the process dying there."""

import shutil
from itertools import count

import pytest

from kvplane.errors import PackError
from kvplane.pack import PrefixCache, load_session, open_root, save_session
from kvplane.storage import LocalStorage
from kvplane.testing.faults import FaultySystem, Kind, attempt, each_fault
from test_pack_damage import FINGERPRINT, STORE, rows_of, same
from test_pack_prefix import extend

IDS = tuple(range(12))


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A root with a session of six tokens, and what it loads as."""
    root = tmp_path_factory.mktemp("before") / "root"
    storage = open_root(root, create=True)
    session = STORE.open([])
    extend(session, IDS[:6], 1)
    save_session(storage, "s", session, FINGERPRINT)
    rows = rows_of(session)
    session.close()
    return root, rows


def quick(root):
    """The root's storage, without waiting for the disk."""
    return LocalStorage(str(root), system=FaultySystem())


def go_on(root, system=None):
    """Resume, add six tokens; then, with the faulty calls, take a cut, save over the old one."""
    session = load_session(open_root(quick(root)), "s", STORE, FINGERPRINT)[1].session
    try:
        extend(session, IDS[6:], 1)
        opened = open_root(LocalStorage(str(root), system=system or FaultySystem()))
        PrefixCache(opened, FINGERPRINT).publish(session, IDS)
        save_session(opened, "s", session, FINGERPRINT)
        return rows_of(session)
    finally:
        session.close()


def what_is_there(root):
    """The session's rows, and the cut's or None, to a reader that comes after."""
    storage = open_root(quick(root))
    session = load_session(storage, "s", STORE, FINGERPRINT)[1].session
    rows = rows_of(session)
    session.close()
    _, loaded = PrefixCache(storage, FINGERPRINT).load([*IDS, 1], STORE, remember=True)
    if loaded is None:
        return rows, None
    cut = rows_of(loaded.session)
    loaded.session.close()
    return rows, cut


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_with_any_call_failing_a_reader_finds_the_old_session_or_the_new(tmp_path, before, kind):
    old_root, old = before
    numbers = count()

    def fresh():
        root = tmp_path / str(next(numbers))
        shutil.copytree(old_root, root)
        return root

    whole = fresh()
    new = go_on(whole)
    _, new_cut = what_is_there(whole)
    seen = set()
    for fault in each_fault(lambda system: go_on(fresh(), system), kinds=[kind]):
        root = fresh()
        outcome = attempt(lambda system, root=root: go_on(root, system), fault)
        rows, cut = what_is_there(root)
        is_new = len(rows[1]) == len(new[1])
        seen.add(is_new)

        assert same(rows, new if is_new else old)
        assert cut is None or same(cut, new_cut)
        assert outcome.error is None or outcome.killed or isinstance(outcome.error, PackError)
        if outcome.error is None:
            assert is_new
        assert [] == STORE.sessions
        # what was left behind is in nobody's way
        assert same(go_on(root) if not is_new else rows, new)
        shutil.rmtree(root)
    assert seen


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.KILL], ids=lambda k: k.value)
def test_with_any_call_failing_a_load_is_right_or_refused_and_leaves_nothing(before, kind):
    root, old = before

    def load(system):
        opened = open_root(LocalStorage(str(root), system=system))
        session = load_session(opened, "s", STORE, FINGERPRINT)[1].session
        rows = rows_of(session)
        session.close()
        return rows

    for fault in each_fault(load, kinds=[kind]):
        outcome = attempt(load, fault)

        assert [] == STORE.sessions
        assert isinstance(outcome.error, PackError) or same(outcome.value, old)
