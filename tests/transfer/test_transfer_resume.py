"""A handoff whose connection is lost goes on where it was."""

from unittest import mock

import pytest
from handoffs import QUICK, both, handoff

import tiny
from hybrid_model import HybridModel, text
from kvplane.transfer import (
    LinkLost,
    Pending,
    Received,
    Sent,
    TransferCorrupt,
    memory_links,
    receive,
    send,
)
from kvplane.transfer.links.memory import MemoryLink

MODEL = HybridModel(8, 300, 40, dtype="float16")
TOTAL = 26


class Short(MemoryLink):
    """An end that is lost after so many segments, and the next one's header, have gone out."""

    def __init__(self, whole, segments):
        self.__dict__ = whole.__dict__
        self._left = segments

    def write(self, parts, clock):
        if len(parts) > 1:
            if not self._left:
                super().write(parts[:1], clock)
                self.close()
                raise LinkLost(link=self.name, what="cut")
            self._left -= 1
        super().write(parts, clock)


def session_of(tokens=900):
    session = MODEL.store(memory="heap").open([])
    MODEL.prefill(session, text(tokens))
    return session


def tried(session, store, pending, *, segments=None, **receiver):
    near, far = memory_links()
    if segments is not None:
        near = Short(near, segments)
    return both(
        lambda: send(session, near, chunk=256, **QUICK),
        lambda: receive(store, far, pending=pending, **QUICK | receiver),
    )


def whole(session, received):
    return tiny.equal(tiny.live_bytes(session), tiny.live_bytes(received.session))


@pytest.mark.parametrize("is_direct", [True, False])
def test_what_came_before_the_connection_was_lost_is_not_sent_again(is_direct, monkeypatch):
    if not is_direct:
        monkeypatch.setattr("kvplane.transfer.filling.is_direct", lambda _: False)
    session, store, pending = session_of(), MODEL.store(memory="heap"), Pending()
    total = sum(segment.nbytes for segment in plan(session))
    before = 0
    for segments in (3, 0, 5, 1, 2):
        ends = tried(session, store, pending, segments=segments)
        before += segments

        assert isinstance(ends.sent, LinkLost)
        assert isinstance(ends.received, LinkLost)
        assert before == pending.num_segments
        assert [] == store.sessions
    ends = tried(session, store, pending)
    left = sum(segment.nbytes for segment in plan(session)[before:])

    assert before == ends.received.resumed
    assert left == ends.sent.nbytes < total == ends.received.nbytes
    assert whole(session, ends.received)
    assert 0 == pending.num_segments


def plan(session):
    from kvplane.transfer.sender import opening_of

    opening, _ = opening_of(session, chunk=256)
    return opening.plan(0).segments


def test_without_a_place_for_it_nothing_is_kept():
    session, store = session_of(), MODEL.store(memory="heap")
    tried(session, store, None, segments=5)

    assert 0 == store.account.held
    assert 0 == tried(session, store, None).received.resumed


def test_what_was_kept_is_given_back():
    session, store = session_of(), MODEL.store(memory="heap")
    with Pending() as pending:
        tried(session, store, pending, segments=5)
        builder = pending._filling._builder

        assert 5 == pending.num_segments
        assert store.account.held
    assert builder._session.closed
    assert 0 == store.account.held


def test_another_handoff_does_not_go_on_with_it():
    session, store, pending = session_of(), MODEL.store(memory="heap"), Pending()
    tried(session, store, pending, segments=5)
    other = session_of(800)
    ends = tried(other, store, pending)

    assert 0 == ends.received.resumed
    assert whole(other, ends.received)


def test_another_store_does_not_go_on_with_it():
    session, store, pending = session_of(), MODEL.store(memory="heap"), Pending()
    tried(session, store, pending, segments=5)
    ends = tried(session, MODEL.store(memory="heap"), pending)

    assert 0 == ends.received.resumed
    assert 0 == store.account.held
    assert whole(session, ends.received)


def test_a_delta_goes_on_as_one():
    session, store, pending = session_of(), MODEL.store(memory="heap"), Pending()
    held = store.open([])
    MODEL.prefill(held, text(512))
    tried(session, store, pending, segments=2, held=[held])
    ends = tried(session, store, pending, held=[held])

    assert (512, 2) == (ends.received.cut, ends.received.resumed)
    assert whole(session, ends.received)


def test_rows_that_are_others_now_are_refused_and_then_sent_whole():
    session, store, pending = session_of(), MODEL.store(memory="heap"), Pending()
    tried(session, store, pending, segments=5)
    group = session.geometry.group_of(3)
    # the same tokens, read once more, and somehow other rows
    session.planes[3].key[0, 0] += 1
    assert group.sliding_window is None
    ends = tried(session, store, pending)

    assert isinstance(ends.received, TransferCorrupt)
    assert "came again with other bytes" in str(ends.received)
    assert 0 == pending.num_segments
    ends = tried(session, store, pending)
    assert whole(session, ends.received)


def test_damage_is_no_lost_connection():
    session, store, pending = session_of(), MODEL.store(memory="heap"), Pending()
    with mock.patch(
        "kvplane.transfer.filling.Filling.finish", side_effect=TransferCorrupt(what="damaged")
    ):
        tried(session, store, pending)

    assert 0 == pending.num_segments
    assert 0 == store.account.held


def test_a_lost_connection_with_damage_before_it_keeps_nothing():
    session, store, pending = session_of(), MODEL.store(memory="heap"), Pending()
    with mock.patch(
        "kvplane.transfer.filling.Filling.settle", side_effect=TransferCorrupt(what="damaged")
    ):
        tried(session, store, pending, segments=4)

    assert 0 == pending.num_segments
    assert 0 == store.account.held


def test_a_handoff_that_does_not_break_needs_none():
    session, store, pending = session_of(100), MODEL.store(memory="heap"), Pending()
    ends = handoff(session, store, receiver={"pending": pending})

    assert isinstance(ends.sent, Sent)
    assert isinstance(ends.received, Received)
    assert 0 == ends.received.resumed
