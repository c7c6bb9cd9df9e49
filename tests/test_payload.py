import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import ArgumentError
from kvplane.geometry import FULL, ModelGeometry
from kvplane.payload import Payload, cut_every, cut_positions, handoff, published, saved_session
from small_models import small

MUSE = ModelGeometry.preset("muse-glimmer-30b")


def of_prompt(num_tokens, **arguments):
    """The receiver runs the last prompt token itself."""
    return handoff(MUSE, num_tokens - 1, **arguments)


# acceptance B


def test_b1_the_payload_of_130815_tokens():
    payload = of_prompt(130_815)

    assert (1_741_395_968, 81_788_928) == (payload.full, payload.sliding)
    assert 1_823_184_896 == payload.total


def test_b2_most_of_it_is_full_layers():
    payload = of_prompt(130_815)

    assert 95.514 == round(100 * payload.full / payload.total, 3)
    assert 4.486 == round(100 * payload.sliding / payload.total, 3)


def test_b3_the_payload_of_65536_tokens():
    assert Payload(full=872_401_920, sliding=81_788_928) == of_prompt(65_536)
    assert 954_190_848 == of_prompt(65_536).total


def test_b4_a_delta_of_65536_against_32768():
    payload = of_prompt(65_536, cut=32_768)

    assert Payload(full=436_194_304, sliding=81_788_928) == payload
    assert 517_983_232 == payload.total


def test_b5_2048_tokens_whole_and_against_1024():
    assert 108_998_656 == of_prompt(2_048).total
    assert 54_472_704 == of_prompt(2_048, cut=1_024).total


@pytest.mark.parametrize(
    ("position", "cut"), [(2_049, 2_049), (2_049, 4_096), (2_049, 128), (0, 0), (256, 256)]
)
def test_b6_a_cut_is_a_multiple_of_256_below_the_position(position, cut):
    with pytest.raises(ArgumentError):
        handoff(MUSE, position, cut=cut)


def test_b6_a_delta_may_be_one_row():
    assert 53_248 == handoff(MUSE, 257, cut=256).total


@pytest.mark.parametrize("number", [-1, 1.0, True, "256"])
def test_positions_and_cuts_are_whole_numbers(number):
    with pytest.raises(ArgumentError) as refused:
        handoff(MUSE, 1_000, cut=number)

    assert ("cut", "a multiple of 256 within [0, 1000)", number) == (
        refused.value.argument,
        refused.value.expected,
        refused.value.got,
    )
    with pytest.raises(ArgumentError) as refused:
        handoff(MUSE, number)

    assert ("position", "at least 1", number) == (
        refused.value.argument,
        refused.value.expected,
        refused.value.got,
    )


@given(st.integers(1, 2_000), st.integers(0, 7))
def test_a_handoff_sends_the_rows_the_receiver_lacks(position, block):
    cut = min(block * 256, (position - 1) // 256 * 256)
    geometry = small(600)
    payload = handoff(geometry, position, cut=cut)
    sliding = len(range(max(cut, position - 600), position))

    assert Payload(full=16 * (position - cut), sliding=16 * sliding) == payload


def test_every_group_of_a_model_is_sent():
    layers = small(8).layers + small(4, row=32, num_sliding=2).layers
    geometry = ModelGeometry(layers=layers, dtype="float16")
    rings = 16 * 8 + 2 * 32 * 4

    assert Payload(full=100 * (16 + 32), sliding=rings) == handoff(geometry, 100)
    assert Payload(full=100 * (16 + 32), sliding=rings) == saved_session(geometry, 100)
    assert Payload(full=256 * (16 + 32), sliding=16 * 7 + 2 * 32 * 3) == published(geometry, 256)


# saved sessions


@pytest.mark.parametrize(("position", "rows"), [(0, 0), (5, 5), (8, 8), (100, 8)])
def test_a_saved_session_has_every_live_row(position, rows):
    assert Payload(full=16 * position, sliding=16 * rows) == saved_session(small(8), position)


def test_a_saved_session_has_its_slack_too():
    assert 16 * 11 == saved_session(small(8), 100, slack=3).sliding
    assert 16 * 9 == saved_session(small(8), 9, slack=3).sliding


@pytest.mark.parametrize("number", [-1, 1.0, True])
def test_a_saved_sessions_numbers_are_whole(number):
    with pytest.raises(ArgumentError, match=f"^slack: expected at least 0, got {number}$"):
        saved_session(MUSE, 1, slack=number)
    for function in (saved_session, cut_positions, published):
        with pytest.raises(ArgumentError, match=f"^position: expected at least 0, got {number}$"):
            function(MUSE, number)


# cuts


@pytest.mark.parametrize(
    ("window", "every"), [(1, 2048), (512, 2048), (513, 2304), (576, 2304), (2048, 8192)]
)
def test_cuts_are_taken_every_four_windows_but_not_more_often_than_2048(window, every):
    assert every == cut_every(small(window))


def test_a_model_without_rings_is_cut_every_2048():
    geometry = ModelGeometry.uniform([FULL], sliding_window=None, num_kv_heads=1, head_dim=4)

    assert 2048 == cut_every(geometry)


def test_the_largest_window_counts():
    layers = small(8).layers + small(4096).layers + small(64).layers

    assert 16_384 == cut_every(ModelGeometry(layers=layers))


@pytest.mark.parametrize(
    ("position", "cuts"),
    [
        (0, []),
        (1, [1]),
        (255, [255]),
        (256, [256]),
        (257, [256, 257]),
        (2048, [2048]),
        (5000, [2048, 4096, 4864, 5000]),
    ],
)
def test_a_prompt_is_cut_regularly_at_its_last_block_and_at_its_end(position, cuts):
    assert cuts == cut_positions(small(8), position)


def test_a_published_prompt_has_full_rows_once_and_a_window_less_one_at_each_cut():
    assert Payload(full=16 * 5000, sliding=4 * 16 * 7) == published(small(8), 5000)
    assert Payload(full=16 * 257, sliding=16 * (256 + 257)) == published(small(600), 257)
    assert Payload(full=0, sliding=0) == published(small(8), 0)
