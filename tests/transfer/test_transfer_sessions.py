"""Which sessions move where: refusals by name, deltas, positions, rotations."""

import dataclasses

import pytest
import torch
from handoffs import handoff, moved

import tiny
from hybrid_model import HybridModel, text
from kvplane.errors import (
    ArgumentError,
    PackMismatch,
    SessionBusy,
    SessionClosed,
    StepOpen,
)
from kvplane.pack import Fingerprint
from kvplane.transfer import TransferRefused, memory_links, plan_of, receive, send


def filled(tokens=11, **options):
    return tiny.filled(tiny.store(4, None, **options).open([]), tokens)


def refused(ends):
    """What both sides were told."""
    for end in ends:
        assert isinstance(end, TransferRefused), end
    mine, theirs = ends
    assert mine.field == theirs.field
    return theirs


@pytest.mark.parametrize(
    ("target", "field"),
    [
        (lambda: tiny.store(4, None, None), "geometry.layers"),
        (lambda: tiny.store(5, None), "geometry.layers[0].sliding_window"),
        (lambda: tiny.store(4, 4), "geometry.layers[1].kind"),
        (lambda: tiny.store(4, None, heads=2), "geometry.layers[0].num_kv_heads"),
        (lambda: tiny.store(4, None, head_dim=4), "geometry.layers[0].head_dim"),
        (lambda: tiny.store(4, None, value_head_dim=4), "geometry.layers[0].value_head_dim"),
        (lambda: tiny.store(4, None, dtype="float16"), "dtype"),
        (lambda: tiny.store(4, None, max_context=10), "position"),
        (lambda: tiny.store(4, None, slack=1, attention="physical"), None),
    ],
    ids=["layers", "window", "kind", "heads", "dim", "value dim", "dtype", "context", "capacity"],
)
def test_what_does_not_fit_is_refused_by_its_name_and_nothing_is_made(target, field):
    store = target()
    error = refused(handoff(filled(), store))

    assert (field or f"capacity of {store.geometry.groups[0].id}") == error.field
    assert [] == store.sessions
    assert 0 == store.account.held


def test_rotary_keys_are_not_taken_for_plain_ones():
    model = HybridModel(4, 32)
    layers = tuple(dataclasses.replace(layer, rotary=None) for layer in model.geometry.layers)
    session = model.store().open([])
    model.prefill(session, text(9))
    plain = tiny.KVStore(dataclasses.replace(model.geometry, layers=layers), max_context=64)

    assert "geometry.layers[0].rotary" == refused(handoff(session, plain)).field


def fingerprint(weights="one", **options):
    return Fingerprint.of(tiny.geometry(4, None, **options), weights=weights)


def test_equal_fingerprints_agree():
    received = moved(
        filled(),
        tiny.store(4, None),
        sender={"fingerprint": fingerprint()},
        receiver={"fingerprint": fingerprint()},
    )

    assert 11 == received.tokens


@pytest.mark.parametrize(
    ("mine", "theirs", "field"),
    [
        (fingerprint("two"), fingerprint(), "fingerprint.weights"),
        (None, fingerprint(), "fingerprint"),
        (fingerprint(), None, "fingerprint"),
    ],
    ids=["other weights", "unknown here", "unknown there"],
)
def test_other_fingerprints_are_refused(mine, theirs, field):
    ends = handoff(
        filled(),
        tiny.store(4, None),
        sender={"fingerprint": mine},
        receiver={"fingerprint": theirs},
    )

    assert field == refused(ends).field


def test_a_fingerprint_of_the_dtype_that_is_converted_agrees():
    source = tiny.store(4, None, dtype="bfloat16").open([])
    tiny.put(source, [1])
    received = moved(
        source,
        tiny.store(4, None),
        sender={"fingerprint": fingerprint(dtype="bfloat16")},
        receiver={"fingerprint": fingerprint()},
    )

    assert 1 == received.tokens


def test_a_fingerprint_of_other_groups_than_the_sessions_is_refused_before_a_byte():
    near, _ = memory_links()
    with pytest.raises(PackMismatch):
        send(filled(), near, fingerprint=fingerprint(heads=2))


def test_what_cannot_be_sent_is_refused_before_a_byte():
    near, far = memory_links()
    store = tiny.store(4, None)
    session = filled()
    with pytest.raises(ArgumentError, match="position"):
        send(store.open([]), near)
    for position in (0, 12, -1, 9, "3", 1.0):
        with pytest.raises(ArgumentError, match="position"):
            send(session, near, position=position)
    with pytest.raises(ArgumentError, match="a batch"):
        send(store.open(batch=1), near)
    with pytest.raises(ArgumentError, match="schedule"):
        send(session, near, schedule="other")
    with pytest.raises(ArgumentError, match="timeout_s"):
        send(session, near, timeout_s=0)
    with session.step([11]) as step:
        with pytest.raises(StepOpen):
            send(session, near)
        step.abort()
    with session.guard, pytest.raises(SessionBusy):
        send(session, near)
    session.close()
    with pytest.raises(SessionClosed):
        send(session, near)

    assert 0 == far.poll([memoryview(bytearray(1))])


def test_the_last_prompt_token_may_be_left_to_the_receiver():
    # the ring has lost the oldest row of a whole window there, which the next token does not see
    session = filled(11)
    received = moved(session, tiny.store(4, None), sender={"position": 10})

    assert 10 == received.tokens == received.session.position
    assert [7, 8, 9] == tiny.held(received.session, 0)
    assert list(range(10)) == tiny.held(received.session, 1) == received.session.tokens
    assert plan_of(session, position=10).payload.total == received.nbytes
    tiny.put(received.session, [10])
    assert tiny.in_rows(session, 0) == tiny.in_rows(received.session, 0)


@pytest.mark.parametrize("tokens", range(1, 14))
@pytest.mark.parametrize("slack", [0, 3])
def test_every_rotation_arrives(tokens, slack):
    session = filled(tokens, slack=slack)
    received = moved(session, tiny.store(4, None, slack=slack)).session
    rows = tiny.in_rows(received, 0)

    assert list(range(max(0, tokens - 4), tokens)) == tiny.held(received, 0)
    assert rows == [
        token if token is None or token >= tokens - 4 else None
        for token in tiny.in_rows(session, 0)
    ]


def test_a_ring_of_another_capacity_is_laid_where_a_session_born_there_has_it():
    received = moved(filled(11, slack=3), tiny.store(4, None))

    assert not received.kept_rotation
    assert tiny.in_rows(filled(11), 0) == tiny.in_rows(received.session, 0)


def test_physical_order_keeps_the_rotation_or_is_refused():
    source = tiny.filled(tiny.store(4, None, attention="physical").open([], first_row=3), 11)
    received = moved(source, tiny.store(4, None, attention="physical"))

    assert tiny.in_rows(source, 0) == tiny.in_rows(received.session, 0)


def test_a_session_that_began_later_moves_as_it_is():
    source = tiny.store(4, None, max_context=200).open([], first_position=100)
    tiny.filled(source, 111)
    received = moved(source, tiny.store(4, None, max_context=200))

    assert (100, 111) == (received.session.first_position, received.session.position)
    assert 11 == received.tokens
    assert [107, 108, 109, 110] == tiny.held(received.session, 0)
    assert list(range(100, 111)) == tiny.held(received.session, 1) == received.session.tokens


def test_a_session_without_ids_moves_without():
    source = tiny.store(4, None).open()
    with source.step(3) as step:
        tiny.write(step, source, range(3))
    received = moved(source, tiny.store(4, None))

    assert received.session.tokens is None
    assert [0, 1, 2] == tiny.held(received.session, 1)


def test_layers_that_share_rows_move_with_their_owners():
    facts = {"shares": {2: 0}}
    source = tiny.filled(tiny.store(4, None, 4, **facts).open([]), 9)
    received = moved(source, tiny.store(4, None, 4, **facts))

    assert [5, 6, 7, 8] == tiny.held(received.session, 2)


def test_the_sender_keeps_its_session_and_both_go_their_own_way():
    source = filled(11)
    received = moved(source, tiny.store(4, None)).session
    tiny.put(source, [50])
    tiny.put(received, [60])

    assert [8, 9, 10, 50] == tiny.held(source, 0)
    assert [8, 9, 10, 60] == tiny.held(received, 0)


def test_both_schedules_bring_the_same_rows():
    model = HybridModel(8, 300, 40, dtype="float16")
    session = model.store(memory="heap").open([])
    model.prefill(session, text(700))
    expected = tiny.live_bytes(session)
    for schedule in ("streamed", "chapter"):
        received = moved(
            session, model.store(memory="heap"), sender={"schedule": schedule, "chunk": 512}
        )

        assert tiny.equal(expected, tiny.live_bytes(received.session))


@pytest.mark.parametrize("side", ["sending", "filling", "both"])
def test_rows_that_no_link_reaches_as_they_lie_are_copied(side, monkeypatch):
    # as those of another device
    for each in ("sending", "filling"):
        if side in {each, "both"}:
            monkeypatch.setattr(f"kvplane.transfer.{each}.is_direct", lambda _: False)
    model = HybridModel(8, 300, 40, dtype="float16")
    session = model.store(memory="heap").open([])
    model.prefill(session, text(700))
    received = moved(session, model.store(memory="heap"), sender={"schedule": "chapter"})

    assert tiny.equal(tiny.live_bytes(session), tiny.live_bytes(received.session))


def test_provenance_travels():
    model = HybridModel(4, 32)
    session = model.store().open([])
    model.prefill(session, text(300))
    received = moved(session, model.store()).session

    assert 256 == received.ledger.canonical
    assert session.ledger.numerics == received.ledger.numerics
    assert [] == list(received.ledger.spans)


def test_rows_of_another_dtype_are_nobodys_cold_run():
    model = HybridModel(4, 32, dtype="bfloat16")
    session = model.store().open([])
    model.prefill(session, text(300))
    received = moved(session, model.store(dtype="float32"))

    assert 256 == session.ledger.canonical
    assert 0 == received.session.ledger.canonical
    assert not received.same_numerics


# deltas

MODEL = HybridModel(4, 64, 300, dtype="float16")


def read(store, ids):
    session = store.open([])
    MODEL.prefill(session, ids)
    return session


def delta(ids, *held, store=None):
    """A handoff of a prompt to a store that holds sessions of these ids."""
    store = store or MODEL.store()
    sessions = [read(store, each) for each in held]
    session = read(MODEL.store(), ids)
    received = moved(session, store, receiver={"held": sessions}, sender={"chunk": 256})
    nbytes = plan_of(session, cut=received.cut).payload.total
    expected = MODEL.decode(session, text(len(ids) + 5)[len(ids) :])

    assert torch.equal(expected, MODEL.decode(received.session, text(len(ids) + 5)[len(ids) :]))
    assert nbytes == received.nbytes
    return received


def test_a_delta_leaves_out_what_is_held():
    received = delta(text(900), text(768))

    assert (768, "") == (received.cut, received.reason)


def test_b6_one_row_may_be_all_that_is_sent():
    received = delta(text(257), text(256))

    assert 256 == received.cut
    assert 4 == received.num_segments


def test_of_several_sessions_the_one_with_most_is_taken():
    assert 512 == delta(text(600), text(300), text(520), [1, 2, 3]).cut


def test_a_session_that_has_gone_on_is_still_good():
    assert 768 == delta(text(800), text(790)).cut


@pytest.mark.parametrize(
    ("ids", "held", "cut", "reason"),
    [
        (text(600), [], 0, "no session is held"),
        (text(600), [text(255)], 0, "no whole block was made on the canonical schedule by both"),
        (text(600), [[5, *text(600)[1:]]], 0, "the tokens are equal up to 0"),
        (text(600), [[*text(300), *text(300)]], 256, "the tokens are equal up to 300"),
        # its rings have lost the rows between the window's begin and the cut
        (text(600), [text(1000)], 256, "rows 301 to 512 of s300.2x8x8.f16 are not held"),
    ],
    ids=["nothing", "short", "other", "a fork", "gone on"],
)
def test_why_not_more_is_held_is_said(ids, held, cut, reason):
    received = delta(ids, *held)

    assert cut == received.cut
    assert reason == received.reason


def test_rows_that_were_made_otherwise_are_not_mixed_with_the_senders():
    store = MODEL.store()
    held = store.open([])
    MODEL.prefill(held, text(512), chunk=128)
    session = read(MODEL.store(), text(600))
    received = moved(session, store, receiver={"held": [held]})

    assert 0 == received.cut
    assert "no whole block was made on the canonical schedule by both" == received.reason


def test_rows_of_other_numerics_are_not_mixed_with_the_senders():
    store = MODEL.store(attention="physical")
    held = read(store, text(512))
    received = moved(read(MODEL.store(), text(600)), store, receiver={"held": [held]})

    assert 0 == received.cut
    assert "the rows were made by other numerics" == received.reason
    assert not received.same_numerics


def test_a_held_session_is_as_it_was():
    store = MODEL.store()
    held = read(store, text(512))
    before = tiny.live_bytes(held)
    session = read(MODEL.store(), text(600))
    received = moved(session, store, receiver={"held": [held]})

    assert 512 == received.cut
    assert tiny.equal(before, tiny.live_bytes(held))
    held.close()
    assert torch.equal(
        MODEL.decode(session, text(605)[600:]), MODEL.decode(received.session, text(605)[600:])
    )


def test_a_held_session_of_another_store_is_refused():
    store = MODEL.store()
    _, far = memory_links()
    for held in (MODEL.store().open([]), "a session"):
        with pytest.raises(ArgumentError, match="held"):
            receive(store, far, held=[held])

    assert [] == store.sessions
