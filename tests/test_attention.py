import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from histories import decode, make_history, prefill, ring_of
from kvplane.attention import blocked, physical, reference
from kvplane.errors import ArgumentError, TensorMismatch
from row_planes import LAYOUTS, same_bits

ALL = (reference, blocked, physical)
IN_EVERY_ORDER = pytest.mark.parametrize(
    "order", ALL, ids=[module.__name__.rpartition(".")[2] for module in ALL]
)
# relative norms, against float64
BOUNDS = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 1e-5}


def error_of(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


@st.composite
def calls(draw):
    """Any attention: shapes, window, cap, sinks, rotation, layout, length of the chunk."""
    groups = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16]))
    heads = draw(st.sampled_from([1, 2, 3]))
    dims = draw(st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (8, 24)]))
    window = draw(st.sampled_from([1, 4, 32, 64, 128, 129, 513, None]))
    stop = draw(st.sampled_from([1, 2, 33, 64, 255, 256, 257, 511, 512, 513, 700]))
    return {
        "history": {
            "stop": stop,
            "groups": groups,
            "heads": heads,
            "dims": dims,
            "dtype": draw(st.sampled_from(list(BOUNDS))),
            "seed": draw(st.integers(0, 99)),
        },
        "first": stop - draw(st.integers(1, min(stop, 19))),
        "rule": {
            "window": window,
            "rotation": draw(st.integers(0, 600)),
            "layout": draw(st.sampled_from(LAYOUTS)),
            "scale": draw(st.sampled_from([dims[0] ** -0.5, 0.3])),
            "softcap": draw(st.sampled_from([None, 5.0])),
            "sinks": draw(st.sampled_from([None, torch.linspace(-2, 3, heads * groups)])),
        },
    }


@given(calls())
def test_both_orders_stay_within_the_bounds_of_float64(call):
    dtype = call["history"]["dtype"]
    history = make_history(**call["history"], queries=dtype)
    first, stop = call["first"], call["history"]["stop"]
    history.query = history.query.double()
    exact = prefill(reference.attend, history, first, stop, **call["rule"])
    history.query = history.query.to(dtype)
    bound = BOUNDS[dtype]

    assert bound >= error_of(prefill(blocked.attend, history, first, stop, **call["rule"]), exact)
    assert bound >= error_of(prefill(physical.attend, history, first, stop, **call["rule"]), exact)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_bounds_hold_over_a_long_window(dtype):
    shape = {"heads": 2, "groups": 4, "dims": (128, 128)}
    history = make_history(2600, **shape, dtype=dtype, queries=dtype)
    history.query = history.query.double()
    exact = decode(reference.attend, history, 2599, window=2048, rotation=551)
    history.query = history.query.to(dtype)
    for order in (blocked, physical):
        out = decode(order.attend, history, 2599, window=2048, rotation=551)

        assert BOUNDS[dtype] >= error_of(out, exact)


@IN_EVERY_ORDER
def test_one_key_alone_gives_its_value(order):
    history = make_history(3, heads=2)
    out = decode(order.attend, history, 2, window=1)

    assert torch.equal(history.value[2].float().repeat_interleave(2, dim=0), out[0, 0])


@IN_EVERY_ORDER
def test_a_sink_takes_its_share_and_reads_no_value(order):
    history = make_history(1, groups=1, dtype=torch.float32)
    history.key[:], history.value[:] = 0.0, 1.0
    out = decode(order.attend, history, 0, window=None, sinks=torch.tensor([math.log(3)]))

    assert torch.allclose(torch.tensor(0.25), out)


@IN_EVERY_ORDER
def test_a_sink_far_above_every_score_takes_it_all(order):
    history = make_history(5, groups=1, dtype=torch.float32)
    out = decode(order.attend, history, 4, window=None, sinks=torch.tensor([1e4]))

    assert torch.all(out == 0)


@IN_EVERY_ORDER
def test_a_softcap_bounds_what_one_key_can_weigh(order):
    history = make_history(2, groups=1, dtype=torch.float32)
    history.key[0], history.key[1], history.query[1] = 1e3, 0.0, 1e3
    history.value[0], history.value[1] = 1.0, 0.0
    out = decode(order.attend, history, 1, window=None, softcap=2.0)

    assert torch.allclose(torch.tensor(math.exp(2) / (math.exp(2) + 1)), out)


@IN_EVERY_ORDER
@pytest.mark.parametrize("query", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_querys_dtype_whatever_the_planes(order, query):
    history = make_history(9, queries=query)

    assert query is prefill(order.attend, history, 4, 9, window=4).dtype


@IN_EVERY_ORDER
def test_no_query_gives_no_output(order):
    history = make_history(9)
    out = prefill(order.attend, history, 9, 9, window=4)

    assert (1, 0, 2, 16) == out.shape


@IN_EVERY_ORDER
def test_rows_that_nothing_wrote_reach_no_output(order):
    history = make_history(40)
    for rotation in range(0, 64, 9):
        plane, runs = ring_of(history, 9, 40, capacity=64, rotation=rotation)
        rule = {"first_key": 9, "first_query": 39, "window": 31, "scale": 0.25}
        out = order.attend(plane, runs, history.queries(39, 40), None, None, **rule)

        assert out.isfinite().all()


def visible(order, history, position, window):
    """The positions whose value has any weight in a query's output."""
    found = []
    for place in range(position + 1):
        history.value[:] = 0.0
        history.value[place] = 1e4
        if prefill(order.attend, history, 0, len(history.key), window=window)[0, position].any():
            found.append(place)
    return found


@IN_EVERY_ORDER
def test_b11_no_query_of_a_chunk_longer_than_the_ring_sees_the_future(order):
    history = make_history(6)

    assert [0, 1] == visible(order, history, 1, 4)
    assert [2, 3, 4, 5] == visible(order, history, 5, 4)


@IN_EVERY_ORDER
def test_b13_each_query_of_a_chunk_sees_its_whole_window_of_old_rows(order):
    history = make_history(10, dtype=torch.float32)
    for position in range(6, 10):
        seen = []
        for place in range(10):
            history.value[:] = 0.0
            history.value[place] = 1e4
            # rows 2 to 5 hold the positions 3, 4, 5 of the view and one older
            out = prefill(order.attend, history, 6, 10, window=4, rotation=2, capacity=4)
            if out[0, position - 6].any():
                seen.append(place)

        assert list(range(position - 3, position + 1)) == seen


@IN_EVERY_ORDER
@pytest.mark.parametrize(("position", "first"), [(9, 6), (3, 0), (4, 1), (5, 2)])
def test_b17_a_window_counts_the_query_itself(order, position, first):
    assert list(range(first, position + 1)) == visible(order, make_history(10), position, 4)


@IN_EVERY_ORDER
def test_b17_a_value_just_outside_the_window_changes_nothing(order):
    history = make_history(10)
    before = prefill(order.attend, history, 9, 10, window=4)
    plane, runs = ring_of(history, 0, 9, capacity=16)
    plane.value[0, 5] = 1e4
    rule = {"first_key": 0, "first_query": 9, "window": 4, "scale": 0.25}
    after = order.attend(plane, runs, history.queries(9, 10), *history.rows(9, 10), **rule)

    assert torch.equal(before, after) or order is physical


@IN_EVERY_ORDER
def test_b19_a_window_of_one_is_the_query_itself(order):
    history = make_history(8)
    out = prefill(order.attend, history, 0, 8, window=1)

    assert torch.equal(history.value.float().repeat_interleave(2, dim=1), out[0])


def test_b20_rows_older_than_the_window_are_out_of_reach_even_as_nan():
    history = make_history(40)
    window, slack = 8, 8
    tight = decode(blocked.attend, history, 39, window=window)
    plane, runs = ring_of(history, 39 - 15, 40, capacity=window + slack, rotation=11)
    rows = [row for run in runs for row in run]
    plane.key[0, rows[:-window]] = torch.nan
    plane.value[0, rows[:-window]] = torch.nan
    rule = {"first_key": 24, "first_query": 39, "window": window, "scale": 0.25}
    slacked = blocked.attend(plane, runs, history.queries(39, 40), None, None, **rule)

    assert tight.isfinite().all()
    assert same_bits(tight, slacked)


BAD_CALLS = {
    "a query past the last key": {"first_query": 7},
    "a query before the first key": {"first_key": 5, "first_query": 4},
    "a negative position": {"first_key": -1, "first_query": 5},
    "no key at all": {"runs": []},
    "a key without a value": {"key": torch.zeros(1, 1, 1, 16)},
    "a value without a key": {"value": torch.zeros(1, 1, 1, 16)},
    "window 0": {"window": 0},
    "a negative window": {"window": -4},
    "scale NaN": {"scale": math.nan},
    "softcap 0": {"softcap": 0.0},
    "softcap NaN": {"softcap": math.nan},
    "one sink for two heads": {"sinks": torch.zeros(1)},
    "sinks of two axes": {"sinks": torch.zeros(2, 1)},
}


@IN_EVERY_ORDER
@pytest.mark.parametrize("changed", BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_call_that_makes_no_sense_is_refused(order, changed):
    history = make_history(7)
    plane, runs = ring_of(history, 0, 7, capacity=8)
    placed = {"first_key": 0, "first_query": 6, "window": 4, "scale": 0.25}
    call = {"runs": runs, "query": history.queries(6, 7), "key": None, "value": None} | placed
    order.attend(plane, **call)

    with pytest.raises(TensorMismatch if "sinks" in changed else ArgumentError):
        order.attend(plane, **(call | changed))


@pytest.fixture
def precision():
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("order", [blocked, physical], ids=["blocked", "physical"])
def test_products_of_fewer_digits_are_refused(order, precision):
    history = make_history(9)
    precision("medium")

    with pytest.raises(ArgumentError, match="set_float32_matmul_precision"):
        decode(order.attend, history, 8, window=4)


def test_a_precision_that_this_processor_ignores_changes_no_bit(precision):
    history = make_history(300, heads=2, groups=8, dims=(128, 128))
    before = prefill(blocked.attend, history, 200, 300, window=128)
    precision("high")
    if torch.cpu.get_capabilities().get("amx_fp16"):
        with pytest.raises(ArgumentError):
            prefill(blocked.attend, history, 200, 300, window=128)
        return

    assert same_bits(before, prefill(blocked.attend, history, 200, 300, window=128))


@pytest.mark.parametrize("order", [blocked, physical], ids=["blocked", "physical"])
def test_autocast_outside_changes_no_bit(order):
    history = make_history(300, dtype=torch.float32)
    before = prefill(order.attend, history, 200, 300, window=128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = prefill(order.attend, history, 200, 300, window=128)

    assert same_bits(before, inside)


@pytest.mark.parametrize("order", [blocked, physical], ids=["blocked", "physical"])
def test_sinks_that_are_parameters_keep_no_gradient(order):
    history = make_history(9)
    sinks = torch.nn.Parameter(torch.zeros(2))

    assert not decode(order.attend, history, 8, window=4, sinks=sinks).requires_grad
