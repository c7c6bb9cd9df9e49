"""Sessions saved and loaded: every live row, both origins, ids, position; bit for bit."""

import itertools

import pytest
import torch

from kvplane import KVStore, ModelGeometry
from kvplane.errors import (
    ArgumentError,
    PackCorrupt,
    PackMismatch,
    PackMissing,
    SessionNotFound,
    SnapshotMismatch,
)
from kvplane.geometry import LayerGeometry
from kvplane.pack import Fingerprint, load_session, open_root, read_session, save_session
from kvplane.pack.blob import blob_name
from kvplane.pack.sessions import session_file, session_names
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, GEOMETRY, grow, new_store


def geometry_of(windows, dtype="bfloat16"):
    kinds = [("sliding_attention", window) for window in windows] + [("full_attention", None)]
    return ModelGeometry(
        layers=tuple(
            LayerGeometry(
                kind=kind, sliding_window=window, num_kv_heads=1, head_dim=2, value_head_dim=4
            )
            for kind, window in kinds
        ),
        dtype=dtype,
    )


def fill(session, num_tokens, *, chunk=256):
    """Rows whose bits say layer and position."""
    while num_tokens:
        count = min(num_tokens, chunk)
        with session.step(
            [p % 251 for p in range(session.position, session.position + count)]
        ) as s:
            for layer, facts in enumerate(session.geometry.layers):
                positions = torch.arange(s.first, s.stop).float() + layer / 16
                key = positions[:, None, None].expand(-1, 1, facts.head_dim)
                value = -positions[:, None, None].expand(-1, 1, facts.value_head_dim)
                s.write(layer, key.contiguous(), value.contiguous())
        num_tokens -= count


def assert_same(first, second):
    assert first.position == second.position
    assert first.tokens == second.tokens
    for name, cursor in first.cursors.items():
        assert cursor.as_tuple() == second.cursors[name].as_tuple()
    for layer in first.planes:
        live = first.live(layer)
        for one, two in zip(
            *(itertools.chain(*s.spans(layer, live.start, live.stop)) for s in (first, second)),
            strict=True,
        ):
            assert torch.equal(one.view(torch.int16), two.view(torch.int16))


def saved_and_loaded(session, fingerprint, store, **facts):
    root = open_root(MemoryStorage(), create=True)
    save_session(root, "s", session, fingerprint, **facts)
    return load_session(root, "s", store, fingerprint)[1].session


@pytest.mark.parametrize("slack", [0, 16])
@pytest.mark.parametrize("windows", [(32,), (64,), (128,), (129,), (513,), (32, 64, 129)], ids=str)
def test_a_session_comes_back_whole_wherever_it_ended(windows, slack):
    geometry = geometry_of(windows)
    fingerprint = Fingerprint.of(geometry, weights="w")
    store = KVStore(geometry, max_context=4096, slack=slack)
    ends = {0, 1, 31, 32, 33, 255, 256, 257, 300}
    for window in windows:
        ends |= {window - 1, window, window + 1, 2 * window - 1, 2 * window, 2 * window + 1}
    session = store.open([])

    for end in sorted(ends):
        fill(session, end - session.position)
        twin = saved_and_loaded(session, fingerprint, store)
        assert_same(session, twin)
        fill(twin, 70, chunk=1)
        other = store.restore(session.snapshot())
        fill(other, 70, chunk=1)
        assert_same(other, twin)
        for done in (twin, other):
            done.close()


def test_only_what_is_new_is_written():
    root = open_root(MemoryStorage(), create=True)
    session = grow(new_store().open([]), list(range(600)))
    first = save_session(root, "s", session, FINGERPRINT)
    again = save_session(root, "s", session, FINGERPRINT)
    grow(session, list(range(600, 610)))
    more = save_session(root, "s", session, FINGERPRINT)

    assert first.blobs_written > 0
    assert 0 == again.blobs_written
    assert 3 == more.blobs_written


def test_a_rewind_forgets_the_spans_of_the_branch_that_was_left():
    root = open_root(MemoryStorage(), create=True)
    store = new_store()
    session = grow(store.open([]), list(range(20)))
    save_session(root, "s", session, FINGERPRINT)
    session.rewind(10)
    grow(session, list(range(90, 110)), seed=7)
    save_session(root, "s", session, FINGERPRINT)
    twin = load_session(root, "s", store, FINGERPRINT)[1].session

    assert_same(session, twin)


def test_rows_of_a_batch_are_saved_one_sequence_at_a_time():
    geometry = geometry_of((8,), "float16")
    fingerprint = Fingerprint.of(geometry, weights="w")
    store = KVStore(geometry, max_context=64)
    batch = store.open([], batch=2)
    with batch.step([[1, 2, 3], [4, 5, 6]]) as step:
        for layer in range(2):
            key = torch.randn(2, 3, 1, 2).half()
            step.write(layer, key, key.repeat(1, 1, 1, 2))
    root = open_root(MemoryStorage(), create=True)
    for sequence in (0, 1):
        save_session(root, f"s{sequence}", batch, fingerprint, sequence=sequence)
        loaded = load_session(root, f"s{sequence}", store, fingerprint)[1].session

        assert [[1, 2, 3], [4, 5, 6]][sequence] == loaded.tokens
        for layer in range(2):
            (mine,) = batch.spans(layer, 0, 3)
            (theirs,) = loaded.spans(layer, 0, 3)
            assert torch.equal(mine[0][sequence], theirs[0])


def test_another_model_is_refused_by_the_part_that_differs():
    root = open_root(MemoryStorage(), create=True)
    store = new_store()
    session = grow(store.open([]), [1, 2, 3])
    save_session(root, "s", session, FINGERPRINT)
    parts = {
        "weights": {"weights": "other"},
        "adapters": {"adapters": ["lora"]},
        "quantisation": {"quantisation": "int8"},
        "keys_rotated": {"keys_rotated": False},
    }

    for field, change in parts.items():
        other = Fingerprint.of(GEOMETRY, **{"weights": "tests", **change})
        with pytest.raises(PackMismatch) as refused:
            load_session(root, "s", store, other)
        assert f"fingerprint.{field}" == refused.value.field
        assert [session] == store.sessions


def test_another_geometry_dtype_or_rotary_base_is_refused():
    base = geometry_of((8,))
    root = open_root(MemoryStorage(), create=True)
    session = KVStore(base, max_context=64).open([])
    fill(session, 5)
    save_session(root, "s", session, Fingerprint.of(base, weights="w"))

    for other in (geometry_of((9,)), geometry_of((8,), "float16"), geometry_of((8, 16))):
        store = KVStore(other, max_context=64)
        with pytest.raises(PackMismatch):
            load_session(root, "s", store, Fingerprint.of(other, weights="w"))
        with pytest.raises(PackMismatch, match="groups"):
            load_session(root, "s", store)
        assert [] == store.sessions


def test_a_store_too_short_for_the_session_is_refused():
    root = open_root(MemoryStorage(), create=True)
    save_session(root, "s", grow(new_store().open([]), list(range(100))), FINGERPRINT)
    small = KVStore(GEOMETRY, max_context=99)

    with pytest.raises(SnapshotMismatch, match="position"):
        load_session(root, "s", small, FINGERPRINT)
    assert [] == small.sessions


def test_a_missing_session_names_the_nearest():
    root = open_root(MemoryStorage(), create=True)
    save_session(root, "notes", grow(new_store().open([]), [1]), FINGERPRINT)

    with pytest.raises(SessionNotFound, match="notes"):
        read_session(root, "note")


def test_a_missing_blob_is_named_with_who_needs_it():
    root = open_root(MemoryStorage(), create=True)
    store = new_store()
    session = grow(store.open([]), [1, 2])
    save_session(root, "s", session, FINGERPRINT)
    blob = min(read_session(root, "s").state.blobs)
    root.delete(blob_name(blob))

    with pytest.raises(PackMissing) as refused:
        load_session(root, "s", store, FINGERPRINT)

    assert (blob, "session s") == (refused.value.blob, refused.value.needed_by)
    assert [session] == store.sessions


def test_a_session_under_another_name_is_refused():
    root = open_root(MemoryStorage(), create=True)
    save_session(root, "a", grow(new_store().open([]), [1, 2]), FINGERPRINT)
    root.replace(session_file("b"), root.read(session_file("a"), limit=1 << 20))

    assert ["a", "b"] == session_names(root)
    with pytest.raises(PackCorrupt, match="'a'"):
        read_session(root, "b")


@pytest.mark.parametrize("name", ["", "A", "../x", "a/b", ".x", "x.json", "x.lock", "a" * 101, "ü"])
def test_a_name_that_cannot_be_a_file_is_refused(name):
    root = open_root(MemoryStorage(), create=True)

    with pytest.raises(ArgumentError):
        save_session(root, name, grow(new_store().open([]), [1]), FINGERPRINT)
    assert [] == session_names(root)


def test_ids_that_are_not_as_many_as_positions_are_refused():
    root = open_root(MemoryStorage(), create=True)
    session = grow(new_store().open([]), [1, 2, 3])

    with pytest.raises(ArgumentError, match="3 ids"):
        save_session(root, "s", session, FINGERPRINT, tokens=[1, 2])
    assert [] == session_names(root)


def test_states_of_other_layers_travel_with_the_session():
    root = open_root(MemoryStorage(), create=True)
    states = {"layers.3.conv": torch.randn(2, 5), "layers.3.seen": torch.tensor(7)}
    save_session(root, "s", grow(new_store().open([]), [1]), FINGERPRINT, states=states)
    loaded = load_session(root, "s", new_store(), FINGERPRINT)[1].states

    assert states.keys() == loaded.keys()
    assert all(torch.equal(states[name], loaded[name]) for name in states)


def test_a_blob_swept_between_naming_and_publishing_is_put_again():
    class Sweeping(MemoryStorage):
        swept = False

        def replace(self, name, data):
            super().replace(name, data)
            if not self.swept:
                self.swept = True
                for blob in self.list("blobs"):
                    self.delete(blob)

    root = open_root(Sweeping(), create=True)
    store = new_store()
    session = grow(store.open([]), list(range(40)))
    save_session(root, "s", session, FINGERPRINT)

    assert_same(session, load_session(root, "s", store, FINGERPRINT)[1].session)
