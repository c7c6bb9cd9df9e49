"""What networks and peers do: the receiver's store is unchanged, or the session whole and right."""

import itertools
import time
from unittest import mock

import pytest
from handoffs import both, handoff, recorded
from proxies import Fault, Linked

import tiny
from kvplane.errors import SessionBusy, TransferError
from kvplane.transfer import (
    LinkLost,
    LinkTimeout,
    Sent,
    TransferAborted,
    TransferCorrupt,
    memory_links,
    receive,
    send,
)
from kvplane.transfer.clock import Clock
from kvplane.transfer.frames import DIGEST_NBYTES, HEADER_NBYTES, Kind, header_of, sealed
from kvplane.transfer.words import FIRST_KEY, Accept, confirm, have, hello, keys_of

ZERO = "0" * 32
TOKENS = 11


def session_of(tokens=TOKENS):
    return tiny.filled(tiny.store(4, None, heads=2, max_context=4096).open([]), tokens)


def store():
    return tiny.store(4, None, heads=2, max_context=4096)


def edges(stream):
    """Where its frames end."""
    found, place = [], 0
    while place < len(stream):
        header = header_of(stream[place : place + HEADER_NBYTES])
        place += HEADER_NBYTES + header.nbytes + DIGEST_NBYTES
        found.append(place)
    return found


def said_by_receiver():
    """The bytes that a receiver says, whose nonces are zero."""
    near, far = memory_links(capacity=1 << 24)
    said = bytearray()
    write = far.write

    def noted(parts, clock):
        said.extend(b"".join(parts))
        write(parts, clock)

    far.write = noted
    handoff(session_of(), store(), links=(near, far))
    return bytes(said)


@pytest.fixture(scope="module", name="streams")
def streams_of_both():
    """What the sender and what the receiver say of the session."""
    with (
        mock.patch("kvplane.transfer.sending.nonce", return_value=ZERO),
        mock.patch("kvplane.transfer.receiving.nonce", return_value=ZERO),
    ):
        return recorded(session_of(), store()), said_by_receiver()


def check(ends, target):
    """That a failed handoff left nothing, and one that was said to be done is there."""
    session = getattr(ends.received, "session", None)
    if session is None:
        assert isinstance(ends.received, TransferError), ends.received
        assert [] == target.sessions
        assert 0 == target.account.held
        assert not isinstance(ends.sent, Sent)
        return False
    assert [session] == target.sessions
    assert list(range(TOKENS)) == tiny.held(session, 1)
    assert [7, 8, 9, 10] == tiny.held(session, 0)
    assert isinstance(ends.sent, Sent) or not ends.received.acknowledged
    return True


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_connection_cut_between_and_inside_frames_leaves_nothing_half(streams, direction):
    ends_of_frames = [0, *edges(streams[direction == "back"])]
    middles = [(first + stop) // 2 for first, stop in itertools.pairwise(ends_of_frames)]
    whole = []
    for place in sorted({*ends_of_frames, *middles}):
        target = store()
        with Linked(**{direction: Fault(cut_after=place)}) as links:
            ends = handoff(session_of(), target, links=links)
        if place < ends_of_frames[-1]:
            assert isinstance(ends.sent, LinkLost) or direction == "there", place
        whole.append(check(ends, target))

    assert not any(whole[:-4])
    assert whole[-1]


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_byte_flipped_on_the_way_is_found(streams, direction):
    length = len(streams[direction == "back"])
    last = edges(streams[direction == "back"])[-2]
    for place in range(0, length, 41):
        target = store()
        with Linked(**{direction: Fault(flip=place)}) as links:
            options = {"idle_timeout_s": 0.3}
            ends = handoff(session_of(), target, links=links, sender=options, receiver=options)
        whole = check(ends, target)

        assert not isinstance(ends.sent, Sent) or (direction == "there" and place >= last)
        assert not whole or place >= last


def test_a_slow_reader_slows_the_sender_down_and_gets_it_all():
    target = store()
    with Linked(there=Fault(piece=700, pause_s=0.001)) as links:
        ends = handoff(session_of(), target, links=links)

    assert check(ends, target)


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_peer_that_stops_is_waited_for_no_longer_than_said(streams, direction):
    places = [0, *edges(streams[direction == "back"])[:-1]]
    for place in places:
        target = store()
        begin = time.monotonic()
        with Linked(**{direction: Fault(stop_after=place + 10)}) as links:
            options = {"idle_timeout_s": 0.2}
            ends = handoff(session_of(), target, links=links, sender=options, receiver=options)
            seconds = time.monotonic() - begin
        check(ends, target)

        assert isinstance(ends.sent, LinkTimeout | LinkLost | Sent)
        assert seconds < 30


def test_a_trickle_does_not_outlast_the_whole():
    target = store()
    begin = time.monotonic()
    with Linked(there=Fault(piece=16, pause_s=0.02)) as links:
        ends = handoff(
            session_of(),
            target,
            links=links,
            sender={"timeout_s": 0.5},
            receiver={"timeout_s": 0.5},
        )
        seconds = time.monotonic() - begin

    assert not check(ends, target)
    assert isinstance(ends.received, LinkTimeout)
    assert "the handoff was not over within 0.5 s" in str(ends.received)
    assert seconds < 30


@pytest.mark.parametrize("bit", [0, 3])
def test_a_sender_believes_no_byte_that_the_receiver_did_not_say(streams, bit):
    session = session_of()
    said = streams[1]
    for place in range(len(said)):
        damaged = bytearray(said)
        damaged[place] ^= 1 << bit
        near, far = memory_links(capacity=1 << 24)
        far.write([bytes(damaged)], Clock(5, 5))
        far._out.end()
        with (
            mock.patch("kvplane.transfer.sending.nonce", return_value=ZERO),
            pytest.raises(TransferError),
        ):
            send(session, near, timeout_s=5)
    assert TOKENS == session.position
    assert not session.guard._lock.locked()


def answered(*frames):
    """What a sender says to a receiver that answers so."""
    near, far = memory_links(capacity=1 << 24)
    said = [sealed(FIRST_KEY, Kind.HELLO, hello(ZERO))]
    said += [sealed(keys_of(ZERO, ZERO).receiver, kind, body) for kind, body in frames]
    far.write(said, Clock(5, 5))
    with (
        mock.patch("kvplane.transfer.sending.nonce", return_value=ZERO),
        pytest.raises(TransferError) as refused,
    ):
        send(session_of(), near, timeout_s=5, idle_timeout_s=0.2)
    return str(refused.value)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([(Kind.ACCEPT, Accept(128, "", 0).packed())], "a multiple of 256"),
        ([(Kind.ACCEPT, Accept(256, "", 0).packed())], "a multiple of 256 within"),
        ([(Kind.ACCEPT, Accept(0, "", 3).packed())], "more segments than there are"),
        (
            [(Kind.ACCEPT, Accept(0, "", 1).packed()), (Kind.HAVE, bytes(37))],
            "HAVE is not as long as was said",
        ),
        ([(Kind.ACCEPT, Accept(0, "", 0).packed()), (Kind.HAVE, bytes(36))], "HAVE came where"),
        ([(Kind.CONFIRM, confirm(11))], "CONFIRM came where ACCEPT is due"),
        ([(Kind.ACCEPT, b'{"format":1}')], "accept: has the fields"),
        ([(Kind.ACCEPT, Accept(0, "", 0).packed()), (Kind.CONFIRM, confirm(10))], "CONFIRM came"),
    ],
    ids=range(8),
)
def test_an_answer_that_means_nothing_ends_the_handoff(frames, words):
    assert words in answered(*frames)


def test_a_receiver_that_claims_rows_which_it_has_not_gets_them():
    sent = []
    wrong = have({0: bytes(32), 7: bytes(32)})
    with mock.patch(
        "kvplane.transfer.sending.Sending.close",
        lambda self, _: sent.append(self.nbytes) or self._heard(Kind.CONFIRM),
    ):
        answered((Kind.ACCEPT, Accept(0, "", 2).packed()), (Kind.HAVE, wrong))

    assert [(4 + 11) * 2 * 2 * 2 * 4] == sent


def test_a_receiver_without_room_says_so_and_keeps_nothing():
    target = tiny.store(4, None, heads=2, max_context=4096, limit=100)
    ends = handoff(session_of(), target)

    assert "would pass the store's limit of 100" in str(ends.received)
    assert isinstance(ends.sent, TransferAborted)
    assert "would pass the store's limit of 100" in str(ends.sent)
    assert [] == target.sessions
    assert 0 == target.account.held


def test_a_receiver_that_gives_up_in_the_middle_tells_the_sender_why():
    target = store()
    with mock.patch(
        "kvplane.transfer.filling.Filling.arrived", side_effect=TransferCorrupt(what="no more")
    ):
        ends = handoff(session_of(3_000), target, sender={"chunk": 256})

    assert [] == target.sessions
    assert "the peer gave up: no more" == str(ends.sent)


def test_a_receiver_that_gives_up_is_heard_before_all_is_sent():
    sent = []

    def progress(done, total):
        sent.append((done, total))
        time.sleep(0.05)

    with mock.patch(
        "kvplane.transfer.filling.Filling.arrived", side_effect=TransferCorrupt(what="no more")
    ):
        ends = handoff(
            session_of(4_000),
            store(),
            links=memory_links(capacity=1 << 24),
            sender={"chunk": 256, "progress": progress},
        )

    assert "the peer gave up: no more" == str(ends.sent)
    assert sent[-1][0] < sent[-1][1] // 2


def test_an_interrupt_on_either_side_frees_everything():
    for side in ("sending.Sending.close", "filling.Filling.finish"):
        target, session = store(), session_of()
        near, far = memory_links()

        def call(work):
            try:
                work()
            except KeyboardInterrupt:
                return "interrupted"
            except TransferError as error:
                return str(error)
            return "done"

        with mock.patch(f"kvplane.transfer.{side}", side_effect=KeyboardInterrupt):
            ends = both(
                lambda near=near, session=session: call(lambda: send(session, near)),
                lambda far=far, target=target: call(lambda: receive(target, far)),
            )

        other = "the peer gave up: KeyboardInterrupt"
        assert {"interrupted", other} == set(ends)
        assert [] == target.sessions
        assert 0 == target.account.held
        assert not session.guard._lock.locked()


def test_both_ends_are_named_in_errors():
    near, far = memory_links()
    far.close()
    with pytest.raises(LinkLost, match="memory, one end: the peer is gone"):
        send(session_of(), near)


def test_nobody_may_use_a_session_that_is_being_sent():
    session, target = session_of(), store()
    seen = []

    def tried(*_):
        with pytest.raises(SessionBusy) as refused:
            session.rewind(3)
        seen.append(refused.value)

    ends = handoff(session, target, sender={"progress": tried})

    assert check(ends, target)
    assert seen
