"""Public defects of such stores, each a recipe: snapshots, chunking, ends, memory."""

import hashlib
import pickle
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
from kvplane import Layout
from kvplane.errors import ContextFull, SnapshotMismatch
from kvplane.ring import RingCursor

pytestmark = pytest.mark.usefixtures("memory")

W = 8


def raw(session, layer=0):
    """The bytes of a plane, row by row."""
    plane = session.planes[layer]
    rows = slice(plane.shape.capacity)
    return torch.cat([plane.key[0, rows].flatten(), plane.value[0, rows].flatten()])


def digest(session):
    return hashlib.sha256(raw(session).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 11, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("slack", [0, 3])
def test_b32_a_restored_ring_has_every_row_where_it_was(tokens, slack):
    session = tiny.filled(tiny.store(W, slack=slack).open(), tokens)
    restored = session.store.restore(session.snapshot())
    for _ in range(20):
        assert tiny.meta(session, 0) == tiny.meta(restored, 0)
        assert tiny.in_rows(session, 0) == tiny.in_rows(restored, 0)
        assert digest(session) == digest(restored)
        for one in (session, restored):
            tiny.put(one, [one.position])


def test_b32_eleven_tokens_in_a_ring_of_eight():
    session = tiny.filled(tiny.store(W).open(), 11)
    restored = session.store.restore(session.snapshot())

    assert [8, 9, 10, 3, 4, 5, 6, 7] == tiny.in_rows(restored, 0)
    assert (3, 3, 8) == tiny.meta(restored, 0)
    tiny.put(restored, [11])

    assert 3 == tiny.in_rows(restored, 0).index(11)


CHILD = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
import tiny, test_defects_snapshot as here
with open(sys.argv[2], "rb") as file:
    session = tiny.store(here.W).restore(pickle.load(file))
print(here.digest(session))
tiny.put(session, [11])
print(here.digest(session), tiny.meta(session, 0))
"""


def test_b32_in_a_new_process_too(tmp_path, request):
    session = tiny.filled(tiny.store(W).open(), 11)
    path = tmp_path / "snapshot"
    path.write_bytes(pickle.dumps(session.snapshot()))
    before = digest(session)
    tiny.put(session, [11])
    out = subprocess.run(
        [sys.executable, "-c", CHILD, str(request.path.parent), str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert f"{before}\n{digest(session)} (4, 4, 8)\n" == out


def test_b33_every_schedule_gives_the_same_rotation(memory):
    planes = []
    for schedule in ([12], [11, 1], [4, 4, 4], [5, 7], [1] * 12):
        session = tiny.store(W, memory=memory).open()
        for count in schedule:
            tiny.put(session, range(session.position, session.position + count))
        planes.append(raw(session))

        assert [8, 9, 10, 11, 4, 5, 6, 7] == tiny.in_rows(session, 0)
        assert (4, 4, 8) == tiny.meta(session, 0)

    for plane in planes[1:]:
        assert torch.equal(planes[0], plane)


def test_b38_a_longer_ring_takes_the_rows_in_blocked_order_and_refuses_them_in_physical():
    snapshot = tiny.filled(tiny.store(W).open(), 11).snapshot()
    restored = tiny.store(W, slack=8).restore(snapshot)

    assert [*range(3, 11)] == tiny.held(restored, 0)
    assert [None] * 3 + [*range(3, 11)] + [None] * 5 == tiny.in_rows(restored, 0)
    with pytest.raises(SnapshotMismatch) as refused:
        tiny.store(W, slack=8, attention="physical").restore(snapshot)

    assert (16, 8) == (refused.value.expected, refused.value.got)


def test_b38_another_window_is_another_model():
    snapshot = tiny.filled(tiny.store(W).open(), 11).snapshot()
    with pytest.raises(SnapshotMismatch) as refused:
        tiny.store(4).restore(snapshot)

    assert "geometry" == refused.value.field


def test_b38_a_shorter_context_takes_nothing():
    snapshot = tiny.filled(tiny.store(None, max_context=64).open(), 40).snapshot()
    smaller = tiny.store(None, max_context=32)
    with pytest.raises(SnapshotMismatch) as refused:
        smaller.restore(snapshot)

    assert ("position", "at most 32", 40) == (
        refused.value.field,
        refused.value.expected,
        refused.value.got,
    )
    assert [] == smaller.sessions
    assert 0 == smaller.account.held


def test_b38_in_a_longer_context_every_head_has_its_new_stride():
    options = {"heads": 2, "head_dim": 4, "layout": {"full_attention": Layout.HEAD_MAJOR}}
    session = tiny.filled(tiny.store(None, max_context=64, **options).open(), 40)
    restored = tiny.store(None, max_context=128, **options).restore(session.snapshot())
    flat = restored.planes[0].key.as_strided((2 * 128 * 4,), (1,))
    expected, _ = tiny.rows(session.groups[0], 0, [5])

    assert torch.equal(expected[0, 1], flat[(1 * 128 + 5) * 4 :][:4])


def test_b47_a_snapshot_does_not_follow_its_session():
    session = tiny.filled(tiny.store(W, None).open(), 8)
    snapshot = session.snapshot()
    before = {layer: key.clone() for layer, (key, _) in snapshot.rows.items()}
    tiny.put_each(session, range(100, 113))

    assert 8 == snapshot.position
    for layer, key in before.items():
        assert torch.equal(key, snapshot.rows[layer][0])
    first, second = (session.store.restore(snapshot) for _ in range(2))
    tiny.put_each(first, range(200, 210))

    assert [*range(8)] == tiny.held(second, 0) == tiny.held(second, 1)
    assert 8 == second.position


class Allocations(TorchDispatchMode):
    """Counts results whose memory is none of the given storages."""

    def __init__(self, *tensors):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                pointer = tensor.untyped_storage().data_ptr()
                if pointer not in self.known:
                    self.found.append(func)
        return out


def test_b93_no_tensor_is_allocated_by_appending(memory):
    session = tiny.store(W, None, max_context=4096, memory=memory).open()
    rows = [tiny.rows(session.groups[layer], layer, [1]) for layer in (0, 1)]
    planes = [part for plane in session.planes.values() for part in (plane.key, plane.value)]
    with Allocations(*planes, *(part for pair in rows for part in pair)) as allocations:
        for _ in range(600):
            with session.step(1) as step:
                step.write(0, *rows[0])
                step.write(1, *rows[1])

    assert [] == allocations.found
    # the counter counts
    with allocations:
        rows[0][0] + 1

    assert 1 == len(allocations.found)


def test_b93_131072_rows_are_appended_in_place():
    session = tiny.store(None, max_context=131_072).open()
    plane = session.planes[0]
    pointer = plane.key.data_ptr()
    cursor = RingCursor(131_072, max_context=131_072)
    key, value = (part[None] for part in tiny.rows(session.groups[0], 0, [1]))
    counter = Allocations(plane.key, plane.value, key, value)
    for position in range(131_072):
        row = cursor.append(position)
        # counting is slow: at the ends, and at every doubling of 1,024
        counted = position < 1024 or position % 16_384 < 16 or position > 130_048
        with counter if counted else nullcontext():
            plane.store([range(row, row + 1)], key, value)

    assert [] == counter.found
    assert pointer == plane.key.data_ptr()
    assert 131_072 == cursor.next_position


def test_b90_a_growing_plane_never_becomes_a_ring():
    session = tiny.filled(tiny.store(None, max_context=32).open(), 32)
    with pytest.raises(ContextFull):
        tiny.put(session, [32])

    assert 0 == tiny.in_rows(session, 0)[0]


@pytest.mark.parametrize("window", [None, 32])
def test_b90_rows_beyond_max_context_are_no_room(window):
    store = tiny.store(window, max_context=16, row_floor=32)

    assert [32] == list(store.plan.capacities.values())

    session = tiny.filled(store.open(), 16)
    with pytest.raises(ContextFull):
        tiny.put(session, [16])


def test_b101_the_position_counts_tokens_not_the_rows_that_are_left():
    session = tiny.filled(tiny.store(8).open(), 20)

    assert 20 == session.position
    assert 20 == session.store.restore(session.snapshot()).position == session.fork().position


def test_b101_rows_are_restored_at_the_positions_they_were_made_for():
    session = tiny.filled(tiny.store(4, None).open(first_position=7), 15)
    restored = session.store.restore(session.snapshot())

    assert (7, range(11, 15), range(7, 15)) == (
        restored.first_position,
        restored.live(0),
        restored.live(1),
    )
