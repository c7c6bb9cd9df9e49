"""Whose rows a document says it holds: batches, padding, other beginnings, sessions in use."""

import json
import threading

import pytest
import torch
from made_by_hand import Made, bits_of, producers_of

from kvplane.errors import (
    ArgumentError,
    PackMismatch,
    PackTooLarge,
    SessionBusy,
    SessionClosed,
    SessionLocked,
    StepOpen,
)
from kvplane.pack import (
    Fingerprint,
    PrefixCache,
    load,
    load_session,
    open_root,
    read_session,
    save,
    save_session,
)
from kvplane.storage import LocalStorage, MemoryStorage

MADE = Made(8, 16, None, max_context=1024)


@pytest.fixture
def root():
    return open_root(MemoryStorage(), create=True)


def saved_and_loaded(made, session, **facts):
    root = open_root(MemoryStorage(), create=True)
    save_session(root, "s", session, made.fingerprint, **facts)
    return load_session(root, "s", made.store, made.fingerprint)


def batch_of(made, ids, *, num_sequences=2):
    """A batch whose rows say their sequence as producer 1 + sequence."""
    session = made.store.open([], batch=num_sequences)
    for first in range(0, len(ids), 256):
        part = ids[first : first + 256]
        with session.step([part] * num_sequences) as step:
            for layer, facts in enumerate(made.geometry.layers):
                rows = [
                    torch.arange(step.first, step.stop).double() * 1024 + (1 + one) * 16 + layer
                    for one in range(num_sequences)
                ]
                key = torch.stack(rows)[:, :, None, None].float().repeat(1, 1, 1, facts.head_dim)
                step.write(layer, key, -key)
    return session


def test_rows_of_a_batch_are_not_what_a_cold_run_would_have():
    alone = MADE.open(range(600))
    batch = batch_of(MADE, list(range(600)))
    one = batch_of(MADE, list(range(600)), num_sequences=1)

    assert 512 == saved_and_loaded(MADE, alone)[0].state.canonical
    assert 0 == saved_and_loaded(MADE, batch, sequence=1)[0].state.canonical
    assert 512 == saved_and_loaded(MADE, one)[0].state.canonical


@pytest.mark.parametrize("position", [9, 30, 300])
def test_padding_in_front_of_a_sequence_is_left_out_and_positions_begin_behind_it(position):
    batch = batch_of(MADE, list(range(position)))
    for padding in (0, 1, 7, position - 8, position - 1, position):
        saved, loaded = saved_and_loaded(MADE, batch, sequence=1, padding=padding)
        twin = loaded.session

        assert position - padding == saved.state.position == twin.position
        assert list(range(padding, position)) == twin.tokens
        for layer in twin.planes:
            live = twin.live(layer)
            behind = max(batch.live(layer).start, padding)
            assert range(behind - padding, position - padding) == live
            rows = [key for key, _ in twin.spans(layer, live.start, live.stop)]
            mine = [key[1] for key, _ in batch.spans(layer, behind, position)]
            if rows:
                assert torch.equal(torch.cat(mine), torch.cat(rows))
        twin.close()


@pytest.mark.parametrize(
    ("facts", "argument"),
    [
        ({"sequence": 2}, "sequence"),
        ({"sequence": -1}, "sequence"),
        ({"padding": 10}, "padding"),
        ({"padding": -1}, "padding"),
    ],
    ids=str,
)
def test_sequences_and_padding_that_are_not_there_are_refused(root, facts, argument):
    with pytest.raises(ArgumentError, match=argument):
        save_session(root, "s", batch_of(MADE, list(range(9))), MADE.fingerprint, **facts)
    with pytest.raises(ArgumentError, match=argument):
        save_session(root, "s", MADE.open(range(9)), MADE.fingerprint, **{**facts, argument: 3})
    assert ("root.json",) == root.list()


@pytest.mark.parametrize("windows", [(8, None), (8, 16), (None,)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 30])
@pytest.mark.parametrize("remember", [True, False])
def test_a_session_that_began_elsewhere_comes_back_where_it_was(windows, count, remember):
    made = Made(*windows, max_context=512)
    ids = list(range(count))
    session = made.store.open([] if remember else None, first_position=100, first_row=None)
    if count:
        with session.step(ids if remember else count) as step:
            made.write(step, 1)
    saved, loaded = saved_and_loaded(made, session)
    twin = loaded.session

    assert bits_of(session) == bits_of(twin)
    assert saved.chain is None
    # where nothing says it, it is called earlier: that refuses what might have been allowed
    assert twin.first_position in {100, 0}
    if remember or None in windows or count < 8:
        assert 100 == twin.first_position
    for one in (session, twin):
        if remember:
            made.extend(one, [7, 8, 9], chunk=1)
        else:
            for _ in range(3):
                with one.step(1) as step:
                    made.write(step, 1)
    assert bits_of(session) == bits_of(twin)


def test_a_session_whose_ids_nobody_knows_is_saved_by_name_and_never_published(root):
    session = MADE.store.open()
    with session.step(20) as step:
        MADE.write(step, 1)
    saved, loaded = saved_and_loaded(MADE, session)

    assert (None, None) == (saved.tokens, saved.chain)
    assert bits_of(session) == bits_of(loaded.session)
    with pytest.raises(ArgumentError, match="20 ids"):
        PrefixCache(root, MADE.fingerprint).publish(session)


def test_other_ids_than_the_session_remembers_are_never_published_nor_saved(root):
    session = MADE.open(range(20))
    cache = PrefixCache(root, MADE.fingerprint)

    with pytest.raises(ArgumentError, match="remembers"):
        cache.publish(session, [*range(19), 99])
    with pytest.raises(ArgumentError, match="remembers"):
        save_session(root, "s", session, MADE.fingerprint, tokens=[*range(19), 99])
    assert ("root.json",) == root.list()


def test_a_batch_is_never_published(root):
    with pytest.raises(ArgumentError, match="one sequence"):
        PrefixCache(root, MADE.fingerprint).publish(batch_of(MADE, list(range(20))))


@pytest.mark.parametrize("at", [-1, 21])
def test_a_cut_outside_the_session_is_refused(root, at):
    with pytest.raises(ArgumentError, match="position"):
        PrefixCache(root, MADE.fingerprint).publish(MADE.open(range(20)), position=at)


def test_another_models_session_is_refused_at_every_door(root):
    other = Made(8, None, max_context=1024)
    session = other.open(range(20))
    cache = PrefixCache(root, MADE.fingerprint)

    with pytest.raises(PackMismatch, match="groups"):
        cache.publish(session)
    with pytest.raises(PackMismatch, match="groups"):
        save_session(root, "s", session, MADE.fingerprint)
    with pytest.raises(PackMismatch, match="groups"):
        cache.match(list(range(20)), other.store)
    with pytest.raises(PackMismatch, match="groups"):
        cache.load(list(range(20)), other.store)
    assert ("root.json",) == root.list()


def doors(root):
    cache = PrefixCache(root, MADE.fingerprint)
    return (cache.publish, lambda session: save_session(root, "s", session, MADE.fingerprint))


def test_a_session_with_a_step_open_is_refused_and_stays_whole(root):
    session = MADE.open(range(40))
    before = bits_of(session)
    with session.step([1, 2, 3]) as step:
        for door in doors(root):
            with pytest.raises(StepOpen):
                door(session)
        step.abort()

    assert ("root.json",) == root.list()
    assert before[:2] == bits_of(session)[:2]


def test_a_closed_session_is_refused(root):
    session = MADE.open(range(40))
    session.close()

    for door in doors(root):
        with pytest.raises(SessionClosed):
            door(session)


def test_a_session_that_another_thread_is_inside_is_refused(root):
    session = MADE.open(range(40))
    refusals = []

    def try_doors():
        for door in doors(root):
            try:
                door(session)
            except SessionBusy:
                refusals.append(door)

    with session.guard:
        thread = threading.Thread(target=try_doors)
        thread.start()
        thread.join()

    assert 2 == len(refusals)


def test_two_writers_of_one_name_are_told_who_is_first(tmp_path):
    session = MADE.open(range(40))
    save(tmp_path / "root", "chat", session, MADE.fingerprint)
    MADE.extend(session, range(10))

    with LocalStorage(tmp_path / "root").lock("chat"), pytest.raises(SessionLocked, match="chat"):
        save(tmp_path / "root", "chat", session, MADE.fingerprint)
    assert 40 == load(tmp_path / "root", "chat", MADE.store)[0].state.position
    save(tmp_path / "root", "chat", session, MADE.fingerprint)
    assert 50 == load(tmp_path / "root", "chat", MADE.store, MADE.fingerprint)[0].state.position


@pytest.mark.parametrize("field", ["tokenizer", "template"])
def test_text_that_utf_8_does_not_have_is_refused_before_anything_is_written(root, field):
    with pytest.raises(ArgumentError, match=field):
        save_session(root, "s", MADE.open(range(4)), MADE.fingerprint, **{field: "\ud800"})
    assert ("root.json",) == root.list()


def test_rows_by_two_numerics_are_told_apart_run_by_run(root):
    other = Made(8, 16, None, max_context=1024, attention="physical")
    save_session(root, "s", MADE.open(range(256)), MADE.fingerprint)
    session = load_session(root, "s", other.store, other.fingerprint)[1].session
    other.extend(session, range(256), chunk=256)
    save_session(root, "s", session, MADE.fingerprint)
    state = read_session(root, "s").state

    assert [256, 512] == [stop for stop, _ in state.numerics]
    assert [MADE.store.numerics, other.store.numerics] == [dict(made) for _, made in state.numerics]
    # canonical rows are those of one numerics
    assert 256 == state.canonical


def test_rows_stay_whose_they_are_through_a_rewind_and_a_fork(root):
    session = MADE.open(range(300))
    save_session(root, "a", session, MADE.fingerprint)
    twin = session.fork()
    MADE.extend(twin, range(20), producer=2)
    save_session(root, "b", twin, MADE.fingerprint)
    MADE.extend(session, range(20), producer=3)
    save_session(root, "c", session, MADE.fingerprint)
    found = {}
    for name in "abc":
        loaded = load_session(root, name, MADE.store, MADE.fingerprint)[1].session
        found[name] = {p for made in producers_of(loaded).values() for p in made}

    assert {"a": {1}, "b": {1, 2}, "c": {1, 3}} == found


def test_a_document_that_could_not_be_read_back_is_never_written(root):
    deep = {}
    for _ in range(20):
        deep = {"a": deep}
    fingerprint = Fingerprint({**MADE.fingerprint.parts, "config": deep})

    with pytest.raises(PackTooLarge, match="depth"):
        save_session(root, "s", MADE.open(range(4)), fingerprint)
    assert () == root.list("sessions")


def test_a_saved_session_says_everything_of_its_model():
    saved = saved_and_loaded(MADE, MADE.open(range(4)))[0]
    fields = json.loads(saved.encoded())

    assert MADE.fingerprint.parts == fields["parts"]
    assert [8, 16, None] == [layer["sliding_window"] for layer in fields["geometry"]["layers"]]
