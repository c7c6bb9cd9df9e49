"""Rows that go out while the prompt is still being read."""

import threading
import time

import pytest
import torch
from handoffs import QUICK, both

import tiny
from hybrid_model import HybridModel, text
from kvplane.errors import ArgumentError, TransferError
from kvplane.schedule import canonical
from kvplane.transfer import TransferAborted, memory_links, receive
from kvplane.transfer.streaming import Streaming

MODEL = HybridModel(8, 64, 300, dtype="float16")


class Noting(HybridModel):
    """Tells a stream after every layer, as hooks of a model do."""

    def read(self, session, ids, stream, *, after=None):
        for part in canonical(session.position, len(ids) - 1):
            with session.step(ids[part.start : part.stop]) as step:
                hidden = self.embedding(torch.tensor(ids[part.start : part.stop]))
                for layer in self.layers:
                    with torch.no_grad():
                        hidden = layer(hidden, torch.arange(part.start, part.stop), step)
                    stream.note()
                    # who says it twice says nothing new
                    stream.note()
                    if after is not None:
                        after(part, layer.number)
            stream.note()


def noting():
    return Noting(8, 64, 300, dtype="float16")


def streamed(ids, session, store, *, after=None, receiver=None, **options):
    near, far = memory_links()
    model = noting()

    def read():
        with Streaming(session, near, ids, chunk=256, **QUICK, **options) as stream:
            model.read(session, ids, stream, after=after)
            return stream.finish()

    return both(read, lambda: receive(store, far, **QUICK | (receiver or {})))


@pytest.mark.parametrize("tokens", [2, 33, 257, 258, 700])
@pytest.mark.parametrize("schedule", ["streamed", "chapter"])
def test_a_streamed_prompt_goes_on_bit_for_bit_with_its_last_token(tokens, schedule):
    ids = text(tokens)
    session = MODEL.store().open([])
    ends = streamed(ids, session, MODEL.store(), schedule=schedule)
    expected = MODEL.decode(session, text(tokens + 8)[tokens - 1 :])
    received = ends.received

    assert tokens - 1 == ends.sent.tokens == received.tokens
    assert ids[:-1] == received.session.tokens
    assert torch.equal(expected, MODEL.decode(received.session, text(tokens + 8)[tokens - 1 :]))


def test_provenance_is_what_reading_made_it():
    ids = text(700)
    session = MODEL.store().open([])
    received = streamed(ids, session, MODEL.store()).received

    assert session.ledger.numerics == received.session.ledger.numerics
    assert 512 == session.ledger.canonical == received.session.ledger.canonical


def test_full_layers_are_under_way_before_the_last_chunk_is_read():
    ids = text(1_000)
    arrived = []
    wait = threading.Event()

    def progress(done, total):
        arrived.append((done, total))
        if done >= 4:
            wait.set()

    def after(part, layer):
        # in the third chunk: both full layers of the first two were received by then
        if part.start == 512 and layer == 0:
            assert wait.wait(10)

    session = MODEL.store().open([])
    ends = streamed(ids, session, MODEL.store(), after=after, receiver={"progress": progress})

    assert 999 == ends.received.tokens
    assert wait.is_set()


def test_a_layer_goes_out_while_the_same_chunk_is_still_computed():
    ids = text(300)
    wait = threading.Event()

    def progress(done, total):
        del total
        if done:
            wait.set()

    def after(part, layer):
        if part.start == 0 and layer == 6:
            assert wait.wait(10)

    session = MODEL.store().open([])
    ends = streamed(ids, session, MODEL.store(), after=after, receiver={"progress": progress})

    assert 299 == ends.received.tokens


def test_what_is_held_on_both_sides_is_not_sent_again():
    ids = text(900)
    store = MODEL.store()
    held = store.open([])
    MODEL.prefill(held, ids[:512])
    session = MODEL.store().open([])
    MODEL.prefill(session, ids[:512])
    received = streamed(ids, session, store, receiver={"held": [held]}).received
    expected = MODEL.decode(session, text(905)[899:])

    assert (512, 899) == (received.cut, received.tokens)
    assert torch.equal(expected, MODEL.decode(received.session, text(905)[899:]))


@pytest.mark.parametrize("shares", [{}, {2: 0}], ids=["of its own", "shared"])
def test_a_chunk_that_waits_to_be_stored_is_waited_for(shares):
    # a ring of 4 that has wrapped: three tokens reach it when nobody reads their old window more
    facts = {"shares": shares, "memory": "heap"}
    session, store = tiny.store(4, None, 4, **facts).open([]), tiny.store(4, None, 4, **facts)
    near, far = memory_links()

    def read():
        with Streaming(session, near, range(10), **QUICK) as stream:
            for first, stop in ((0, 6), (6, 9)):
                with session.step(list(range(first, stop))) as step:
                    for layer in tiny.owners(session):
                        tiny.write(step, session, range(first, stop), [layer])
                        stream.note()
                        # whoever sends now sends old rows
                        time.sleep(0.1)
                stream.note()
            return stream.finish()

    ends = both(read, lambda: receive(store, far, **QUICK))

    assert 9 == ends.sent.tokens
    for layer in tiny.owners(session):
        assert tiny.held(session, layer) == tiny.held(ends.received.session, layer)


class Died(Exception):
    pass


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_step_that_is_taken_back_takes_the_handoff_back(at):
    def after(part, layer):
        if (part.start, layer) == (512, at):
            raise Died

    store = MODEL.store()
    session = MODEL.store().open([])
    near, far = memory_links()
    model = noting()

    def read():
        with (
            pytest.raises(Died),
            Streaming(session, near, text(900), chunk=256, **QUICK) as stream,
        ):
            model.read(session, text(900), stream, after=after)
        return "died"

    ends = both(read, lambda: receive(store, far, **QUICK))

    assert "died" == ends.sent
    assert isinstance(ends.received, TransferAborted)
    assert "the prompt was not read to its end" in str(ends.received)
    assert [] == store.sessions
    assert 512 == session.position


def test_rows_of_an_aborted_step_are_never_confirmed():
    ids = text(600)
    store, session = MODEL.store(), MODEL.store().open([])
    near, far = memory_links()
    model = noting()

    def read():
        with Streaming(session, near, ids, chunk=256, **QUICK) as stream:
            with session.step(ids[:256]) as step:
                for layer in range(8):
                    group = session.geometry.group_of(layer)
                    step.write(layer, *tiny.rows(group, 0, range(256)))
                    stream.note()
                step.abort()
            model.read(session, ids, stream)
            return stream.finish()

    ends = both(read, lambda: receive(store, far, **QUICK))

    assert "a step was taken back whose rows were under way" in str(ends.sent)
    assert "a step was taken back whose rows were under way" in str(ends.received)
    assert [] == store.sessions


def test_a_receiver_that_gives_up_stops_the_reading():
    store = MODEL.store(limit=10)
    session = MODEL.store().open([])
    ends = streamed(text(900), session, store)

    assert isinstance(ends.sent, TransferError)
    assert "limit of 10" in str(ends.sent)


def test_a_prompt_that_is_not_read_to_its_end_is_not_confirmed():
    ids = text(300)
    session, store = MODEL.store().open([]), MODEL.store()
    near, far = memory_links()

    def read():
        with Streaming(session, near, ids, **QUICK) as stream:
            return stream.finish()

    ends = both(read, lambda: receive(store, far, **QUICK))

    assert isinstance(ends.sent, ArgumentError)
    assert (299, 0) == (int(ends.sent.expected), ends.sent.got)
    assert isinstance(ends.received, TransferAborted)
    assert [] == store.sessions


@pytest.mark.parametrize(
    ("held", "ids"), [([1, 2], [1, 3, 4]), ([1, 2], [1, 2]), ([], [1]), ([], [])]
)
def test_a_prompt_goes_on_from_what_the_session_holds(held, ids):
    near, _ = memory_links()
    session = MODEL.store().open([])
    if held:
        MODEL.prefill(session, held)
    with pytest.raises(ArgumentError, match="ids"):
        Streaming(session, near, ids)
    with pytest.raises(ArgumentError, match="ids"):
        Streaming(MODEL.store().open(), near, [1, 2])
