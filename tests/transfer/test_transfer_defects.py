"""Public bugs of handoffs, as recipes: B75, B77, B80, B88, B89."""

import random
import struct

import pytest
import torch
from handoffs import handoff, moved, rows_of

import tiny
from kvplane import KVStore, Layout
from kvplane.geometry import ModelGeometry
from kvplane.transfer import Schedule, TransferRefused, TransferUnconfirmed, memory_links
from kvplane.transfer.filling import Filling
from kvplane.transfer.sending import Sending


def layout(of):
    return {"sliding_attention": of, "full_attention": of}


def flat(session, layer):
    """A plane's key elements as they lie in memory."""
    plane = session.planes[layer]
    return plane.span.tensor().view(plane.shape.dtype)


def test_b75_a_head_major_plane_gets_each_element_where_it_belongs():
    # position 9 in row 1 of a ring of 8: its key element (h 1, d 2) is 100 * 9 + 10 + 2
    shape = {"heads": 2, "head_dim": 4}
    token = tiny.filled(tiny.store(8, **shape, layout=layout(Layout.TOKEN_MAJOR)).open([]), 10)
    head = moved(token, tiny.store(8, **shape, layout=layout(Layout.HEAD_MAJOR))).session

    assert 912 == flat(head, 0)[(1 * 8 + 1) * 4 + 2]
    assert 302 == flat(head, 0)[14]
    # keys and values lie side by side: 16 elements a row
    assert 912 == flat(token, 0)[1 * 16 + 1 * 4 + 2]
    back = moved(head, tiny.store(8, **shape, layout=layout(Layout.TOKEN_MAJOR))).session
    assert torch.equal(flat(token, 0), flat(back, 0))


# as bfloat16 about 0.16, 188 and 436; read as float16 they are 1.536, 3.617 and 3.926
PATTERNS = (0x3E25, 0x433C, 0x43DA)


def store_with(dtype, bits=()):
    """A store, and a session whose keys are these bit patterns."""
    store = tiny.store(4, None, heads=1, head_dim=2, dtype=dtype)
    session = store.open([])
    for place, pattern in enumerate(bits):
        data = torch.tensor([pattern, pattern], dtype=torch.int32).to(torch.int16)
        row = data.view(store.dtype).view(1, 1, 2)
        with session.step([place]) as step:
            for layer in range(2):
                step.write(layer, row, row)
    return store, session


def test_b77_bf16_rows_are_never_read_as_f16():
    _, session = store_with("bfloat16", PATTERNS)
    target, _ = store_with("float16")
    ends = handoff(session, target)

    for error in ends:
        assert isinstance(error, TransferRefused)
        assert ("dtype", "float16", "bfloat16") == (error.field, error.expected, error.got)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_b77_rows_become_f32_by_value(dtype):
    _, session = store_with(dtype, PATTERNS)
    target, _ = store_with("float32")
    received = moved(session, target)
    keys = rows_of(received.session)[1][0][:, 0, 0].tolist()
    wanted = [_as_float(pattern, dtype) for pattern in PATTERNS]

    assert wanted == keys
    assert not received.same_numerics
    assert 0 == received.session.ledger.canonical
    if dtype == "bfloat16":
        assert [188.0, 436.0] == keys[1:]


def _as_float(pattern, dtype):
    if dtype == "float16":
        return struct.unpack("<e", struct.pack("<H", pattern))[0]
    return struct.unpack("<f", struct.pack("<I", pattern << 16))[0]


def test_b77_f32_rows_are_not_squeezed_into_16_bits():
    store, session = store_with("float32")
    with session.step([0]) as step:
        for layer in range(2):
            step.write(layer, torch.full((1, 1, 2), 1e6), torch.zeros(1, 1, 2))
    target = tiny.store(4, None, heads=1, head_dim=2, dtype="float16")
    ends = handoff(session, target)

    assert "dtype" == ends.received.field == ends.sent.field
    assert [session] == store.sessions
    assert [] == target.sessions


@pytest.mark.parametrize("before", [None, 5])
def test_b80_rows_come_to_the_rotation_they_had(before):
    source = tiny.filled(tiny.store(8).open([]), 11)
    target = tiny.store(8)
    if before is not None:
        # what the consumer's rings did before is of no account
        tiny.filled(target.open([]), 8 + before).close()
    received = moved(source, target)

    assert (3, 3, 8) == tiny.meta(received.session, 0)
    assert list(range(3, 11)) == tiny.held(received.session, 0)
    assert [8, 9, 10, 3, 4, 5, 6, 7] == tiny.in_rows(received.session, 0)
    assert received.kept_rotation


def test_b80_a_rotation_of_its_own_is_kept_too():
    source = tiny.filled(tiny.store(8).open([], first_row=5), 11)
    received = moved(source, tiny.store(8))

    assert (3, 0, 8) == tiny.meta(source, 0) == tiny.meta(received.session, 0)
    assert tiny.in_rows(source, 0) == tiny.in_rows(received.session, 0)


@pytest.mark.parametrize("tokens", [1, 8, 9, 40])
def test_b88_both_sides_name_the_tokens_that_the_receiver_has(tokens):
    source = tiny.filled(tiny.store(8, None).open([]), tokens)
    target = tiny.store(8, None)
    ends = handoff(source, target)

    assert tokens == ends.sent.tokens == ends.received.tokens == ends.received.session.position
    assert list(range(tokens)) == ends.received.session.tokens
    assert ends.received.acknowledged
    # and it goes on there
    tiny.put(ends.received.session, [tokens])
    assert list(range(max(0, tokens - 7), tokens + 1)) == tiny.held(ends.received.session, 0)


def test_b88_a_receiver_that_counts_otherwise_is_an_error_on_both_sides(monkeypatch):
    finish = Filling.finish
    monkeypatch.setattr(Filling, "finish", lambda self: finish(self) - 1)
    target = tiny.store(8, None)
    ends = handoff(tiny.filled(tiny.store(8, None).open([]), 9), target)

    assert isinstance(ends.sent, TransferUnconfirmed)
    assert "9 tokens were sent, the receiver can use 8" == str(ends.sent)
    assert "the peer gave up: 9 tokens were sent, the receiver can use 8" == str(ends.received)
    assert [] == target.sessions


def test_b89_the_payload_is_the_chapters():
    schedule = Schedule(geometry=ModelGeometry.preset("muse-glimmer-30b"), position=130_814)

    assert 1_823_184_896 == 130_814 * 13_312 + 3 * 2_048 * 13_312 == schedule.payload.total
    assert 1_823_184_896 == sum(segment.nbytes for segment in schedule.segments)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lost", [False, True])
def test_b89_any_order_and_repeats_are_harmless_and_a_hole_is_not(seed, lost, monkeypatch):
    store = KVStore(tiny.geometry(4, None, 300), max_context=1024)
    source = tiny.filled(store.open([]), 700)
    target = KVStore(tiny.geometry(4, None, 300), max_context=1024)
    send = Sending.send

    def shuffled(self, segments, *, progress=None):
        order = list(segments)
        order.append(order[0])
        random.Random(seed).shuffle(order)
        if lost:
            gone = order.pop()
            order = [each for each in order if each != gone]
        send(self, order, progress=progress)

    monkeypatch.setattr(Sending, "send", shuffled)
    ends = handoff(source, target, links=memory_links(), sender={"chunk": 256})
    if lost:
        assert "1 of 6 segments are missing" == str(ends.received)
        assert "the peer gave up: 1 of 6 segments are missing" == str(ends.sent)
        assert [] == target.sessions
    else:
        for layer in range(3):
            assert tiny.held(source, layer) == tiny.held(ends.received.session, layer)
