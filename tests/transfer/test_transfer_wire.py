"""The receiver's side of the wire, fed bytes: whatever comes, nothing or the whole session."""

import contextlib
import dataclasses
import itertools
from unittest import mock

import pytest
from handoffs import recorded
from hypothesis import given
from hypothesis import strategies as st

import tiny
from kvplane.errors import KVPlaneError, TransferError
from kvplane.pack.encoding import canonical
from kvplane.transfer import (
    TransferAborted,
    TransferCorrupt,
    TransferIncomplete,
    TransferRefused,
    TransferTooLarge,
    TransferUnconfirmed,
    TransferVersion,
)
from kvplane.transfer.filling import Filling
from kvplane.transfer.frames import (
    DIGEST_NBYTES,
    HEADER_NBYTES,
    Header,
    Kind,
    digest_of,
    header_of,
    sealed,
)
from kvplane.transfer.opening import Opening
from kvplane.transfer.receiving import Receiving
from kvplane.transfer.words import (
    FIRST_KEY,
    abort,
    close,
    confirm,
    hello,
    keys_of,
    rows_key,
    whole_digest,
)

ZERO = "0" * 32
KEY = keys_of(ZERO, ZERO).sender


def store():
    return tiny.store(4, None, heads=2)


@pytest.fixture(scope="module", name="stream")
def stream_of_a_session():
    """What a sender says of 11 tokens, with nonces of zero."""
    with (
        mock.patch("kvplane.transfer.sending.nonce", return_value=ZERO),
        mock.patch("kvplane.transfer.receiving.nonce", return_value=ZERO),
    ):
        session = tiny.filled(store().open([]), 11)
        return recorded(session, store(), chunk=256)


def frames_of(stream):
    """The frames in a stream, as bytes."""
    found = []
    while stream:
        header = header_of(stream[:HEADER_NBYTES])
        nbytes = HEADER_NBYTES + header.nbytes + DIGEST_NBYTES
        found.append(stream[:nbytes])
        stream = stream[nbytes:]
    return found


class Fed:
    """A receiver with a store of its own, fed bytes."""

    def __init__(self):
        self.store = store()
        self.filling = Filling(self.store, fingerprint=None)
        self.machine = Receiving(self.filling, number=ZERO)
        self.taken = 0

    def feed(self, data, *, step=1 << 20):
        """Give it bytes, at most `step` at a time, until it is done or refuses."""
        while data and not self.machine.is_done:
            buffer = self.machine.buffers()[0]
            count = min(len(buffer), len(data), step)
            buffer[:count] = data[:count]
            self.taken += count
            self.machine.advance(count)
            data = data[count:]
        return self

    @property
    def said(self):
        """The frames it has said."""
        return [header_of(frame[:HEADER_NBYTES]).kind for frame in self.machine.outbox]

    def end(self):
        """Whether nothing of it is left when it gives up."""
        # not collected before it is looked at
        builder = self.filling._builder
        self.filling.abandon()
        assert builder is None or builder._session.closed
        return self.store.sessions == [] and self.store.account.held == 0


def fails(data):
    """The error of a receiver that is fed this; afterwards its store is as it was."""
    fed = Fed()
    with pytest.raises(KVPlaneError) as refused:
        fed.feed(data)
    assert fed.store.sessions == [] or fed.machine.tokens is not None
    assert fed.end()
    return refused.value


def test_a_whole_stream_is_a_whole_session(stream):
    fed = Fed().feed(stream)

    assert [Kind.HELLO, Kind.ACCEPT, Kind.CONFIRM] == fed.said
    assert 11 == fed.machine.tokens == fed.filling.session.position
    assert [7, 8, 9, 10] == tiny.held(fed.filling.session, 0)
    assert list(range(11)) == tiny.held(fed.filling.session, 1)
    assert list(range(11)) == fed.filling.session.tokens


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_bytes_may_come_in_any_pieces(stream, step):
    fed = Fed().feed(stream, step=step)

    assert fed.machine.is_done
    assert list(range(11)) == tiny.held(fed.filling.session, 1)


def test_a_stream_cut_after_any_byte_shows_nothing_before_its_close(stream):
    shown = len(stream) - len(frames_of(stream)[-1])
    for stop in range(len(stream)):
        fed = Fed().feed(stream[:stop])

        assert (stop >= shown) == (fed.store.sessions != []), stop
        assert fed.end()


@pytest.mark.parametrize("bit", [0, 7])
def test_a_bit_flipped_anywhere_is_refused(stream, bit):
    last = len(stream) - len(frames_of(stream)[-1])
    for place in range(len(stream)):
        damaged = bytearray(stream)
        damaged[place] ^= 1 << bit
        fed = Fed()
        try:
            fed.feed(bytes(damaged))
        except TransferError:
            pass
        else:
            # a longer body is announced, within what is allowed: it waits for bytes
            assert not fed.machine.is_done, place

        assert (place >= last) == (fed.store.sessions != []), place
        assert fed.end()


def test_a_digest_is_of_a_kind_a_number_a_length_and_a_key():
    header = Header(Kind.SEGMENT, 3, 4)
    others = [
        header._replace(kind=Kind.CLOSE),
        header._replace(number=4),
        header._replace(nbytes=5),
    ]
    digests = {digest_of(KEY, each, [b"rows"]) for each in (header, *others)}
    digests |= {digest_of(FIRST_KEY, header, [b"rows"]), digest_of(KEY, header, [b"Rows"])}

    assert 6 == len(digests)
    assert digest_of(KEY, header, [b"rows"]) == digest_of(KEY, header, [b"ro", b"ws"])


@pytest.mark.parametrize("place", [1, 2, 5, 6])
def test_only_rows_have_a_number(stream, place):
    frames = frames_of(stream)
    frame = frames[place]
    kind = header_of(frame[:HEADER_NBYTES]).kind
    numbered = sealed(KEY, kind, frame[HEADER_NBYTES:-DIGEST_NBYTES], number=1)

    assert f"{kind.name} has the number 1" == str(fails(b"".join([*frames[:place], numbered])))


def test_the_ids_of_a_session_that_does_not_fit_are_not_waited_for(stream):
    opening = Opening.decoded(frames_of(stream)[1][HEADER_NBYTES:-DIGEST_NBYTES])
    cursors = {
        name: (1 << 20, 1 << 20, 0, 0) if name.startswith("f0") else (4, 4, (1 << 20) - 4, 0)
        for name in opening.cursors
    }
    far = dataclasses.replace(opening, position=1 << 20, cursors=cursors)
    frames = [frames_of(stream)[0], sealed(KEY, Kind.OPENING, far.encoded())]
    error = fails(b"".join(frames))

    assert isinstance(error, TransferRefused)
    assert ("position", "at most 64", 1 << 20) == (error.field, error.expected, error.got)


def test_fewer_ids_than_were_announced_are_refused(stream):
    frames = frames_of(stream)
    fewer = sealed(KEY, Kind.IDS, frames[2][HEADER_NBYTES : HEADER_NBYTES + 4])

    assert "not those of the opening" in str(fails(b"".join([*frames[:2], fewer])))


def test_segments_may_come_in_any_order_and_again(stream):
    first, *rest = frames_of(stream)
    opening, ids, *segments, closing, confirmed = rest
    assert len(segments) == 2
    for order in itertools.permutations([*segments, segments[0]]):
        fed = Fed().feed(b"".join([first, opening, ids, *order, closing, confirmed]))

        assert fed.machine.is_done
        assert [7, 8, 9, 10] == tiny.held(fed.filling.session, 0)
        assert list(range(11)) == tiny.held(fed.filling.session, 1)


def test_a_missing_segment_means_not_complete(stream):
    frames = frames_of(stream)
    for lost in (3, 4):
        error = fails(b"".join(frame for number, frame in enumerate(frames) if number != lost))

        assert isinstance(error, TransferIncomplete)
        assert (1, 2) == (error.missing, error.num_segments)


def test_a_segment_that_comes_again_with_other_bytes_is_refused(stream):
    frames = frames_of(stream)
    segment = bytearray(frames[3][:-DIGEST_NBYTES])
    segment[HEADER_NBYTES] ^= 1
    header = header_of(bytes(segment[:HEADER_NBYTES]))
    key = rows_key(frames[1][HEADER_NBYTES:-DIGEST_NBYTES])
    other = bytes(segment) + digest_of(key, header, [bytes(segment[HEADER_NBYTES:])])
    error = fails(b"".join([*frames[:4], other, *frames[4:]]))

    assert "came again with other bytes" in str(error)


def test_segments_that_come_again_and_again_are_refused(stream):
    frames = frames_of(stream)
    error = fails(b"".join([*frames[:4], *([frames[3]] * 10_000)]))

    assert isinstance(error, TransferCorrupt)
    assert "more segments came again" in str(error)


def test_bytes_that_come_again_are_compared_with_their_digest(stream):
    frames = frames_of(stream)
    again = bytearray(frames[3])
    again[HEADER_NBYTES + 3] ^= 1
    error = fails(b"".join([*frames[:4], bytes(again), *frames[4:]]))

    assert "damaged" in str(error)


def test_a_recorded_transfer_is_refused_by_another_receiver(stream):
    fed = Fed()
    fed.machine = Receiving(fed.filling)
    with pytest.raises(TransferCorrupt, match="OPENING 0: damaged, or of another transfer"):
        fed.feed(stream)

    assert fed.end()


def test_frames_out_of_turn_are_refused(stream):
    frames = frames_of(stream)
    for first, second in itertools.pairwise(range(len(frames))):
        if {first, second} == {3, 4}:
            continue
        frames[first], frames[second] = frames[second], frames[first]
        assert isinstance(fails(b"".join(frames)), TransferCorrupt | TransferIncomplete)
        frames[first], frames[second] = frames[second], frames[first]


@pytest.mark.parametrize("number", range(6))
def test_a_frame_that_comes_twice_is_harmless_only_when_it_is_rows(stream, number):
    frames = frames_of(stream)
    twice = b"".join([*frames[: number + 1], *frames[number:]])
    if number in {3, 4}:
        assert Fed().feed(twice).machine.is_done
    else:
        assert "is due" in str(fails(twice))


@pytest.mark.parametrize(
    ("place", "value", "error"),
    [(0, 0x4C, TransferVersion), (4, 2, TransferVersion), (5, 12, TransferCorrupt)],
    ids=["magic", "version", "kind"],
)
def test_a_peer_of_another_kind_is_refused_at_its_first_bytes(stream, place, value, error):
    other = bytearray(stream)
    other[place] = value

    assert isinstance(fails(bytes(other)), error)


def test_a_peer_of_a_later_version_is_called_that():
    body = hello(ZERO).replace(b'"format":1', b'"format":2')
    error = fails(sealed(FIRST_KEY, Kind.HELLO, body))

    assert isinstance(error, TransferVersion)
    assert (1, 2) == (error.expected, error.got)


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("nbytes", [1 << 40, (1 << 64) - 1])
def test_no_memory_is_taken_for_a_length_that_was_not_announced(stream, number, nbytes):
    frames = frames_of(stream)
    header = header_of(frames[number][:HEADER_NBYTES])
    huge = header._replace(nbytes=nbytes).packed()
    error = fails(b"".join([*frames[:number], huge]))

    assert isinstance(error, TransferTooLarge)
    assert nbytes == error.got


def test_a_segment_there_is_not_is_refused(stream):
    frames = frames_of(stream)
    header = Header(Kind.SEGMENT, 2, 8)

    assert "segment 2 of 2" in str(fails(b"".join([*frames[:3], header.packed()])))


def test_a_whole_with_another_digest_is_refused(stream):
    frames = frames_of(stream)
    wrong = sealed(KEY, Kind.CLOSE, close(whole_digest(KEY, [b"0" * 32] * 2)))

    assert "digest over the whole" in str(fails(b"".join([*frames[:5], wrong])))


def test_a_sender_that_gives_up_says_why(stream):
    frames = frames_of(stream)
    for number in range(1, 6):
        stopped = [*frames[:number], sealed(KEY, Kind.ABORT, abort("no more"))]
        error = fails(b"".join(stopped))

        assert isinstance(error, TransferAborted)
        assert "no more" == error.reason


def test_a_sender_that_counts_otherwise_is_an_error(stream):
    frames = frames_of(stream)
    error = fails(b"".join([*frames[:-1], sealed(KEY, Kind.CONFIRM, confirm(12))]))

    assert isinstance(error, TransferUnconfirmed)
    assert (12, 11) == (error.expected, error.got)


@given(st.binary(max_size=400))
def test_garbage_is_refused_or_waits(data):
    fed = Fed()
    with contextlib.suppress(TransferError):
        fed.feed(data)

    assert fed.end()


@given(data=st.data())
def test_any_mixture_of_frames_and_garbage_shows_nothing_that_is_not_whole(stream, data):
    frames = frames_of(stream)
    pieces = data.draw(
        st.lists(st.one_of(st.sampled_from(frames), st.binary(max_size=60)), max_size=12)
    )
    mixed = b"".join([frames[0], *pieces])
    fed = Fed()
    with contextlib.suppress(TransferError):
        fed.feed(mixed, step=data.draw(st.integers(1, 200)))
    if fed.store.sessions:
        assert list(range(11)) == tiny.held(fed.filling.session, 1)

    assert fed.end()


@given(data=st.data())
def test_any_body_with_a_right_digest_is_read_strictly(stream, data):
    frames = frames_of(stream)
    kind = data.draw(st.sampled_from([Kind.OPENING, Kind.CLOSE, Kind.REFUSE, Kind.ABORT]))
    body = data.draw(st.one_of(st.binary(max_size=80), json_bodies()))
    before = frames[:5] if kind is Kind.CLOSE else frames[:1]
    with pytest.raises(TransferError):
        Fed().feed(b"".join([*before, sealed(KEY, kind, body)]))


def json_bodies():
    """Canonical JSON of any shape, most of it none that the wire has."""
    leaves = st.one_of(st.none(), st.booleans(), st.integers(-10, 10), st.text("ab", max_size=4))
    names = st.sampled_from(["format", "digest", "reason", "position", "geometry", "field"])
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner),
        max_leaves=8,
    )
    return st.dictionaries(names, values).map(lambda fields: canonical({**fields, "format": 1}))
