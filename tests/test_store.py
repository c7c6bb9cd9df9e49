"""The store as a whole: sessions come and go, what it says of itself, and the memory it chooses."""

import gc
import json

import pytest
import torch

import tiny
from kvplane import KVStore, Layout, ModelGeometry
from kvplane.errors import SessionClosed

pytestmark = pytest.mark.usefixtures("memory")

ROW = 16


def test_sessions_are_listed_until_they_are_closed_or_collected():
    store = tiny.store(4, None)
    first, second = store.open(), store.open()

    assert {first, second} == set(store.sessions)

    first.close()

    assert [second] == store.sessions

    del second
    gc.collect()

    assert [] == store.sessions
    assert 0 == store.account.held


def test_leaving_a_store_or_a_session_closes_it():
    with tiny.store(4, None) as store:
        with store.open() as session:
            tiny.put(session, [0])

        assert session.closed

        other = tiny.filled(store.open(), 6)

    assert other.closed
    with pytest.raises(SessionClosed):
        store.open()


def test_tensors_over_rows_stay_readable_when_all_is_closed(memory):
    store = tiny.store(4, None, memory=memory)
    session = tiny.filled(store.open(), 6)
    spans = session.spans(1, 0, 6)
    snapshot = session.snapshot()
    store.close()
    del session, store
    gc.collect()

    assert [6] == [key.clone().shape[0] for key, _ in spans]
    assert torch.isfinite(snapshot.rows[1][0]).all()


def test_equal_configurations_give_equal_descriptions(memory):
    def described(**options):
        return tiny.store(4, None, **options).describe()

    other = {"heap": "mapped", "mapped": "heap"}[memory]

    one, two = described(), described()

    assert one == two
    assert one.to_dict() == json.loads(json.dumps(two.to_dict()))
    assert one.numerics == two.numerics
    for options in (
        {"slack": 1},
        {"max_context": 65},
        {"memory": other},
        {"attention": "physical"},
        {"row_floor": 32},
        {"dtype": "float16"},
        {"head_dim": 3},
        {"layout": {"full_attention": Layout.TOKEN_MAJOR}},
    ):
        assert one != described(**options)


def test_a_description_holds_no_state_and_no_address():
    store = tiny.store(4, None)
    before = store.describe()
    tiny.filled(store.open(), 9)

    assert before == store.describe()
    assert "0x" not in json.dumps(before.to_dict())


def test_a_geometry_gives_its_dtype_unless_the_store_is_told_another():
    geometry = ModelGeometry.preset("gemma-3-270m")

    assert torch.bfloat16 is KVStore(geometry, max_context=64).dtype
    for dtype in ("float16", torch.float16):
        store = KVStore(geometry, max_context=64, dtype=dtype)

        assert torch.float16 is store.dtype
        assert "float16" == store.geometry.dtype == store.describe().dtype
        assert all(group.id.endswith(".f16") for group in store.geometry.groups)


def test_memory_is_reported_by_session_and_group():
    store = tiny.store(4, None, memory="heap", limit=10_000)
    first = tiny.filled(store.open(), 6)
    second = store.open()
    step = second.step(7, speculative=True)
    step.__enter__()
    tiny.write(step, second, range(7))
    report = store.memory()
    by_rows = sorted(
        (groups["s4.1x2x2.f32"].rows_held, groups["f0.1x2x2.f32"].rows_held)
        for groups in report.sessions
    )

    assert [(0, 0), (4 * ROW, 6 * ROW)] == by_rows
    assert 2 * (4 + 64) * ROW == report.total.reserved
    assert 3 * ROW == report.total.scratch
    assert 10_000 == report.limit
    assert 0 == report.total.shared
    step.abort()

    assert 0 == store.memory().total.scratch
    assert first.position == 6


def test_captures_are_counted_until_they_are_let_go():
    store = tiny.store(4, None)
    session = store.open()
    with session.step(6, capture=(2, 5)) as step:
        tiny.write(step, session, range(6))

    assert (2 + 3) * ROW == store.memory().captures

    session.captures.clear()

    assert 0 == store.memory().captures


def test_no_rows_have_no_bytes():
    shape = tiny.store(4, None).open().planes[1].shape

    assert [] == shape.byte_ranges(range(3, 3))
