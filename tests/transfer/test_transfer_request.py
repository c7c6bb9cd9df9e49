"""A prompt for whoever prefills."""

import pytest

from kvplane.errors import ArgumentError, TransferError
from kvplane.transfer import (
    LinkTimeout,
    TransferAborted,
    TransferCorrupt,
    TransferTooLarge,
    memory_links,
    receive,
)
from kvplane.transfer.clock import Clock
from kvplane.transfer.frames import Header, Kind, sealed
from kvplane.transfer.request import ask, asked, decline
from kvplane.transfer.words import FIRST_KEY
from tiny import store


def heard(data, *, max_tokens=10):
    near, far = memory_links()
    near.write([data], Clock(1, 1))
    return asked(far, Clock(0.2, 0.2), max_tokens=max_tokens)


@pytest.mark.parametrize("ids", [[], [5], [0, 2**32 - 1, 7]])
def test_a_prompt_arrives_as_it_was_asked(ids):
    near, far = memory_links()
    ask(near, ids, Clock(1, 1))

    assert ids == asked(far, Clock(1, 1), max_tokens=3)


def test_ids_outside_32_bits_are_refused():
    near, _ = memory_links()
    with pytest.raises(ArgumentError):
        ask(near, [2**32], Clock(1, 1))


def test_no_memory_is_taken_for_a_prompt_that_is_too_long():
    with pytest.raises(TransferTooLarge) as refused:
        heard(Header(Kind.REQUEST, 0, 1 << 50).packed())

    assert (40, 1 << 50) == (refused.value.limit, refused.value.got)


@pytest.mark.parametrize(
    "data",
    [
        sealed(FIRST_KEY, Kind.HELLO, b"1234"),
        sealed(FIRST_KEY, Kind.REQUEST, b"12345"),
        sealed(FIRST_KEY, Kind.REQUEST, b"1234", number=1),
        sealed(bytes(32), Kind.REQUEST, b"1234"),
    ],
    ids=["another kind", "no whole id", "a number", "another digest"],
)
def test_what_is_no_request_is_refused(data):
    with pytest.raises(TransferCorrupt):
        heard(data)


def test_every_byte_of_a_request_counts():
    whole = sealed(FIRST_KEY, Kind.REQUEST, b"12345678")
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        with pytest.raises(TransferError):
            heard(bytes(damaged))
    with pytest.raises(LinkTimeout):
        heard(whole[:-1])


def test_whoever_asks_hears_why_there_will_be_no_handoff():
    near, far = memory_links()
    decline(near, "the prompt is too long", linger_s=0.01)
    with pytest.raises(TransferAborted, match="the peer gave up: the prompt is too long"):
        receive(store(4, None), far, timeout_s=5)
