"""Who made a session's rows: kept in step with positions, by an independent list of positions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from kvplane.ledger import Ledger, Span

MINE = {"chunk": 4, "torch": "1"}
OTHER = {"chunk": 4, "torch": "2"}


def runs(makers, first):
    """(stop, maker) runs of a list of makers, one a position."""
    result = []
    for at, maker in enumerate(makers, first + 1):
        if result and result[-1][1] == maker:
            result[-1] = (at, maker)
        else:
            result.append((at, maker))
    return result


ledger_operations = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.sampled_from([1, 2, 3, 4, 5, 8]), st.booleans()),
        st.tuples(st.just("cut"), st.integers(0, 12), st.just(value=False)),
    ),
    max_size=12,
)


@given(ledger_operations, st.sampled_from([0, 0, 3]))
def test_a_ledger_knows_who_made_each_position(operations, first):
    ledger = Ledger(first_position=first)
    makers = []
    for name, number, other in operations:
        position = first + len(makers)
        if name == "record":
            maker = OTHER if other else MINE
            ledger.record(position, position + number, maker)
            makers += [maker] * number
        else:
            cut = max(first, position - number)
            ledger.cut(cut)
            del makers[cut - first :]

        assert runs(makers, first) == ledger.numerics
        # whole chunks of one maker from position 0 on, and no more than there is
        assert 0 == ledger.canonical % 4
        assert ledger.canonical <= first + len(makers)
        assert not ledger.canonical or (
            first == 0 and all(maker == makers[0] for maker in makers[: ledger.canonical])
        )


def recorded(*steps, first_position=0):
    ledger = Ledger(first_position=first_position)
    for first, stop, maker in steps:
        ledger.record(first, stop, maker)
    return ledger


@pytest.mark.parametrize(
    ("canonical", "steps"),
    [
        (0, [(0, 3, MINE)]),
        (4, [(0, 4, MINE)]),
        (8, [(0, 4, MINE), (4, 8, MINE)]),
        (8, [(0, 4, MINE), (4, 8, MINE), (8, 9, MINE), (9, 12, MINE)]),
        # one call of two chunks, and a chunk off the grid, are other calls
        (0, [(0, 8, MINE)]),
        (0, [(0, 2, MINE), (2, 6, MINE), (6, 8, MINE), (8, 12, MINE)]),
        (4, [(0, 4, MINE), (4, 8, OTHER)]),
        (4, [(0, 4, MINE), (4, 8, OTHER), (8, 12, MINE)]),
    ],
)
def test_canonical_rows_are_whole_chunks_from_the_start_by_one_maker(canonical, steps):
    assert canonical == recorded(*steps).canonical


def test_a_session_that_starts_elsewhere_has_no_canonical_rows():
    assert 0 == recorded((4, 8, MINE), first_position=4).canonical


@pytest.mark.parametrize(("cut", "canonical"), [(12, 8), (9, 8), (8, 8), (7, 4), (4, 4), (3, 0)])
def test_a_cut_leaves_whole_chunks(cut, canonical):
    ledger = recorded((0, 4, MINE), (4, 8, MINE), (8, 11, MINE), (11, 12, OTHER))
    ledger.cut(cut)

    assert canonical == ledger.canonical


def test_rows_cut_and_made_again_on_the_schedule_are_canonical_again():
    ledger = recorded((0, 4, MINE), (4, 8, MINE))
    ledger.cut(4)
    ledger.record(4, 8, MINE)

    assert 8 == ledger.canonical


def test_a_cut_shortens_spans_and_drops_later_ones():
    ledger = Ledger(spans={"a": [Span(0, 4, "x"), Span(4, 8, "y")], "b": [Span(5, 8, "z")]})
    ledger.cut(5)

    assert {"a": [Span(0, 4, "x"), Span(4, 5, "y")], "b": []} == ledger.spans


def test_a_copy_goes_its_own_way():
    ledger = recorded((0, 4, MINE))
    ledger.spans["a"] = [Span(0, 4, "x")]
    copy = ledger.copy()

    assert ledger == copy
    copy.record(4, 8, OTHER)
    copy.spans["a"].append(Span(4, 8, "y"))

    assert [(4, MINE)] == ledger.numerics
    assert {"a": [Span(0, 4, "x")]} == ledger.spans
    assert 4 == ledger.canonical == copy.canonical


def test_a_session_records_what_it_kept_under_its_stores_numerics():
    store = tiny.store(4, None, slack=4)
    session = store.open()
    tiny.put(session, range(3))
    tiny.put(session, range(3, 8), accepted=2, speculative=True)
    with session.step(2) as step:
        tiny.write(step, session, [5, 6])
        step.abort()

    assert [(5, store.numerics)] == session.ledger.numerics
    session.rewind(4)

    assert [(4, store.numerics)] == session.ledger.numerics


def test_a_session_on_the_schedule_is_canonical_to_its_last_whole_chunk():
    store = tiny.store(4, None, max_context=1024)
    session = store.open()
    for count in (256, 256, 40):
        with session.step(count) as step:
            tiny.write(step, session, range(session.position, session.position + count))

    assert 512 == session.ledger.canonical
    restored = store.restore(session.snapshot())

    assert session.ledger == restored.ledger
