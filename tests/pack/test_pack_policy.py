"""Where cuts are taken, and which a step that crosses several keeps."""

import pytest
from made_by_hand import geometry_of

from kvplane.errors import ArgumentError
from kvplane.pack import Policy, crossed, wished_cuts
from kvplane.pack.policy import every

SMALL = geometry_of(32, None).groups
LARGE = geometry_of(2048, 513, None).groups


@pytest.mark.parametrize(
    ("windows", "expected"),
    [((32, None), 2048), ((513, None), 2304), ((2048, 64, None), 8192), ((None,), 2048)],
)
def test_cuts_on_the_way_are_four_of_the_largest_windows_apart_and_on_blocks(windows, expected):
    assert expected == every(geometry_of(*windows).groups)


@pytest.mark.parametrize(
    ("first", "stop", "expected"),
    [
        (0, 1, [1]),
        (0, 255, [255]),
        (0, 256, [256]),
        (0, 257, [256, 257]),
        (0, 2048, [2048]),
        (0, 2049, [2048, 2049]),
        (2048, 2049, [2049]),
        (100, 4500, [2048, 4096, 4352, 4500]),
        (7, 7, []),
    ],
)
def test_a_prompt_is_cut_on_the_way_at_its_last_chunks_edge_and_at_its_end(first, stop, expected):
    assert expected == wished_cuts(first, stop, SMALL, chunk=256)


def test_a_policy_of_its_own_says_how_often_and_whether_at_the_end():
    often = Policy(every=512)
    never = Policy(every=0)
    marks_only = Policy(prompt_end=False, turn_end=False, every=0)

    assert [512, 1024, 1280, 1300] == often.prompt_cuts(0, 1300, LARGE, chunk=256)
    assert [1280, 1300] == never.prompt_cuts(0, 1300, LARGE, chunk=256)
    assert [] == marks_only.prompt_cuts(0, 1300, LARGE, chunk=256)
    assert [3, 9] == marks_only.turn_cuts(9, {3, 9, 10})
    assert [3, 9] == Policy().turn_cuts(9, {3, 12})
    assert [9] == Policy(marks=False).turn_cuts(9, {3})
    assert [] == Policy().turn_cuts(0, {0})


@pytest.mark.parametrize("number", [-256, 1, 255, 300])
def test_cuts_off_the_blocks_are_refused(number):
    with pytest.raises(ArgumentError):
        Policy(every=number)


def test_a_step_keeps_the_deepest_cut_inside_it_and_says_what_it_left_out():
    cuts = [10, 20, 30, 40]

    assert ((30,), (20,)) == crossed(cuts, 10, 40)
    assert ((20, 30), ()) == crossed(cuts, 10, 40, allowed=2)
    assert ((), (20, 30)) == crossed(cuts, 10, 40, allowed=0)
    assert ((), ()) == crossed(cuts, 31, 40)
