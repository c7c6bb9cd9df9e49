import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import ArgumentError
from kvplane.footprint import Bytes, capacity_of, footprint
from kvplane.geometry import FULL, SLIDING, LayerGeometry, ModelGeometry
from small_models import small

MUSE = ModelGeometry.preset("muse-glimmer-30b")


# acceptance A4 to A9


@pytest.mark.parametrize(
    ("max_context", "sliding", "full"),
    [
        (1, 32, 32),
        (31, 32, 32),
        (32, 32, 32),
        (33, 33, 33),
        (100, 100, 100),
        (2047, 2047, 2047),
        (2048, 2048, 2048),
        (2049, 2048, 2049),
        (131_072, 2048, 131_072),
    ],
)
def test_capacities_with_the_chapters_row_floor(max_context, sliding, full):
    ring, plane = MUSE.groups

    assert sliding == capacity_of(ring, max_context=max_context, row_floor=32)
    assert full == capacity_of(plane, max_context=max_context, row_floor=32)


def test_a_session_at_131072_takes_the_chapters_bytes():
    now = footprint(MUSE, context=131_072, sessions=4)

    assert 81_788_928 == now.kind(SLIDING).reserved
    assert 1_744_830_464 == now.kind(FULL).reserved
    assert 1_826_619_392 == now.session.reserved
    assert 7_306_477_568 == now.total.reserved


@pytest.mark.parametrize(
    ("context", "one", "four"),
    [
        (2_048, 109_051_904, 436_207_616),
        (8_192, 190_840_832, 763_363_328),
        (16_384, 299_892_736, 1_199_570_944),
        (32_768, 517_996_544, 2_071_986_176),
        (65_536, 954_204_160, 3_816_816_640),
        (131_072, 1_826_619_392, 7_306_477_568),
    ],
)
def test_one_and_four_sessions_take_the_chapters_bytes_at_every_depth(context, one, four):
    now = footprint(MUSE, context=context, sessions=4)

    assert (one, four) == (now.session.reserved, now.total.reserved)
    assert (one, four) == (now.session.rows_held, now.total.rows_held)
    assert (one, four) == (now.session.pages_held, now.total.pages_held)


@pytest.mark.parametrize(("context", "share"), [(2_048, 25.0), (8_192, 57.1), (131_072, 95.5)])
def test_the_full_layers_share_grows_with_the_context(context, share):
    now = footprint(MUSE, context=context)

    assert share == round(100 * now.kind(FULL).reserved / now.session.reserved, 1)


def test_131072_tokens_take_16_and_three_quarters_of_2048():
    deep, shallow = (footprint(MUSE, context=size).session.reserved for size in (131_072, 2_048))

    assert 16.75 == deep / shallow


def test_a_16_token_speculative_step_journals_15_rows_of_each_ring():
    now = footprint(MUSE, context=8_192, step=16, speculative=True)

    assert 599_040 == now.session.scratch
    assert (599_040, 0) == (now.kind(SLIDING).journal, now.kind(FULL).journal)


# defect B91: sums of bytes


def test_b91_gpt_oss_120b_is_summed_once_layer_by_layer():
    now = footprint(ModelGeometry.preset("gpt-oss-120b"), context=131_072)

    assert 4_831_838_208 == now.kind(FULL).reserved
    assert 4_718_592 == now.kind(SLIDING).reserved
    assert 4_836_556_800 == now.session.reserved


def test_b91_layers_of_different_heads_and_dims_are_summed_each_with_its_own():
    shape = {"num_kv_heads": 4, "head_dim": 256, "value_head_dim": 256}
    wide = {"num_kv_heads": 1, "head_dim": 512, "value_head_dim": 128}
    layers = (
        LayerGeometry(kind=SLIDING, sliding_window=512, **shape),
        LayerGeometry(kind=FULL, **wide),
        LayerGeometry(kind=SLIDING, sliding_window=64, **shape),
        LayerGeometry(kind=SLIDING, sliding_window=512, shares_kv_with=0, **shape),
        LayerGeometry(kind="conv"),
    )
    now = footprint(ModelGeometry(layers=layers), context=1_000)

    assert 2 * (512 + 64) * 4 * 512 == now.kind(SLIDING).reserved
    assert 2 * 1_000 * (512 + 128) == now.kind(FULL).reserved


# capacities


def test_a_ring_has_its_window_and_slack_but_no_more_than_max_context():
    ring, _ = small(8).groups

    assert [8, 11, 10, 3] == [
        capacity_of(ring, max_context=100),
        capacity_of(ring, max_context=100, slack=3),
        capacity_of(ring, max_context=10, slack=3),
        capacity_of(ring, max_context=3),
    ]


def test_a_full_plane_has_neither_slack_nor_page_rounding():
    _, plane = small(8).groups

    assert 10 == capacity_of(plane, max_context=10, slack=3, page_nbytes=4096)


@pytest.mark.parametrize(
    ("window", "page_nbytes", "capacity"),
    [
        (16, 256, 16),  # whole pages already
        (17, 256, 17),  # 15 rows more would be too many
        (129, 256, 144),  # 15 rows of 129 are less than an eighth
        (120, 256, 128),
        (119, 256, 128),
        (113, 256, 113),  # 15 of 113 are more than an eighth
        (120, 2048, 128),
        (112, 2048, 112),  # 16 of 112 are a seventh
        (113, 2048, 113),  # 15 of 113 are more than an eighth
        (114, 2048, 128),  # 14 of 114 are less
        (128, 24, 129),  # a page of 24 bytes is two thirds of three rows
        (9, 1, 9),
    ],
)
def test_a_ring_is_rounded_up_to_whole_pages_when_that_costs_less_than_an_eighth(
    window, page_nbytes, capacity
):
    ring, _ = small(window, row=16).groups

    assert capacity == capacity_of(ring, max_context=10_000, page_nbytes=page_nbytes)


def test_exactly_an_eighth_is_too_much():
    ring, _ = small(16, row=16).groups

    assert 16 == capacity_of(ring, max_context=99, page_nbytes=18 * 16)
    assert 18 == capacity_of(small(17, row=16).groups[0], max_context=99, page_nbytes=18 * 16)


@given(
    st.integers(1, 300),
    st.integers(1, 400),
    st.integers(0, 20),
    st.sampled_from([1, 48, 256, 4096]),
)
def test_a_rings_capacity_is_whole_pages_or_unrounded(window, max_context, slack, page_nbytes):
    ring, _ = small(window, row=24, head_dim=6).groups
    capacity = capacity_of(ring, max_context=max_context, slack=slack, page_nbytes=page_nbytes)
    plain = min(max_context, window + slack)
    whole = next(n for n in range(plain, plain + 4097) if n * ring.row_nbytes % page_nbytes == 0)

    assert (whole if 8 * (whole - plain) < plain else plain) == capacity


# pages


def pages_by_hand(group, rows, *, capacity, layout, page_nbytes):
    """The pages behind the first rows of a plane, from every byte's place."""
    key, value = group.head_dim * group.itemsize, group.value_head_dim * group.itemsize
    places = []
    for row in range(rows):
        for head in range(group.num_kv_heads):
            for base, nbytes in ((0, key), (group.num_kv_heads * key, value)):
                if layout == "NHD":
                    first = row * group.row_nbytes + base + head * nbytes
                else:
                    first = base * capacity + (head * capacity + row) * nbytes
                places.append(range(first, first + nbytes))
    return page_nbytes * len({byte // page_nbytes for place in places for byte in place})


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 12),
    st.integers(0, 5),
    st.sampled_from([1, 2, 12, 16, 64]),
    st.sampled_from(["NHD", "HND"]),
    st.integers(1, 2),
)
def test_pages_held_are_those_behind_every_row_that_was_written(
    heads, dim, value_dim, context, more, page_nbytes, layout, num_sliding
):
    geometry = small(
        7,
        num_sliding=num_sliding,
        num_kv_heads=heads,
        head_dim=dim,
        value_head_dim=value_dim,
    )
    now = footprint(
        geometry,
        context=context,
        max_context=context + more + 1,
        page_nbytes=page_nbytes,
        layout={SLIDING: layout, FULL: layout},
    )
    for plan in now.groups:
        pages = pages_by_hand(
            plan.group,
            min(context, plan.capacity),
            capacity=plan.capacity,
            layout=layout,
            page_nbytes=page_nbytes,
        )

        assert len(plan.group.layers) * pages == plan.nbytes.pages_held


def test_rings_lie_row_by_row_and_full_planes_head_by_head():
    geometry = small(64, num_kv_heads=4, head_dim=8)
    now = footprint(geometry, context=1, max_context=64, page_nbytes=128)

    assert (128, 8 * 128) == (now.kind(SLIDING).pages_held, now.kind(FULL).pages_held)


# sums


def test_bytes_are_added_field_by_field_but_gathered_one_at_a_time():
    one = Bytes(reserved=1, rows_held=2, pages_held=3, journal=4, capture=5, gather=6, waiting=7)
    two = Bytes(
        reserved=10, rows_held=20, pages_held=30, journal=40, capture=50, gather=5, waiting=70
    )
    both = Bytes(
        reserved=11, rows_held=22, pages_held=33, journal=44, capture=55, gather=6, waiting=77
    )

    assert both == one + two == two + one
    assert 44 + 55 + 6 == both.scratch
    assert (22, 12) == ((one * 2).capture + 12, (one * 2).gather)


def test_a_plan_is_written_as_json():
    now = footprint(small(8, num_sliding=2), context=20, sessions=3, step=5, max_context=64)
    facts = json.loads(json.dumps(now.to_dict()))

    assert (20, 64, 3) == (facts["context"], facts["max_context"], facts["sessions"])
    assert now.session.reserved == facts["session"]["reserved"]
    assert 3 * now.session.journal == facts["total"]["scratch"]
    assert {"kind": SLIDING, "layers": [0, 1], "capacity": 8, "journal": 2 * 4 * 16} == {
        name: facts["groups"]["s8.1x4x4.f16"][name]
        for name in ("kind", "layers", "capacity", "journal")
    }


def test_planes_are_reserved_for_max_context_and_hold_what_was_written():
    now = footprint(small(8), context=5, max_context=100)

    assert small(8) == now.geometry
    assert 1 == now.sessions
    assert (16 * (8 + 100), 16 * (5 + 5)) == (now.session.reserved, now.session.rows_held)
    assert (5, 100) == (now.context, now.max_context)


def test_floors_and_pages_reach_every_plane():
    floor = footprint(small(8), context=5, row_floor=32)
    whole = footprint(small(120), context=999, page_nbytes=2048)
    other = footprint(small(120), context=999, page_nbytes=2048, ring_page_nbytes=1)

    assert [32, 32] == [plan.capacity for plan in floor.groups]
    assert [128, 999] == [plan.capacity for plan in whole.groups]
    assert [120, 999] == [plan.capacity for plan in other.groups]


def test_a_session_that_has_taken_nothing_holds_nothing():
    now = footprint(small(8), context=0, step=5, gather=True, page_nbytes=4096)

    assert Bytes(reserved=16 * 2) == now.session
    assert 1 == now.max_context


def test_forks_share_every_page_or_copy_them():
    now = footprint(small(8), context=100)
    ring, plane = 8 * 16, 100 * 16

    assert ring + plane == now.forks_held(3, shares_pages=True)
    assert 4 * (ring + plane) == now.forks_held(3, shares_pages=False)
    assert ring + plane == now.forks_held(0, shares_pages=False)
    with pytest.raises(ArgumentError, match="forks: expected a whole number within"):
        now.forks_held(-1, shares_pages=True)


@pytest.mark.parametrize(
    ("written", "ring", "keys", "values"),
    [
        # a page of 64 bytes is four rows of the ring, eight of the keys or values of a head
        (1, 1, 1, 1),
        # rows 4 to 7 of the ring, then row 0
        (5, 2, 2, 1),
        (9, 2, 2, 2),
        (300, 2, 38, 38),
    ],
)
def test_a_page_that_a_fork_writes_to_is_its_own(written, ring, keys, values):
    now = footprint(small(8), context=100, max_context=500, page_nbytes=64)
    own = 64 * (ring + keys + values)

    assert now.session.pages_held + 3 * own == now.forks_held(3, shares_pages=True, written=written)


def test_a_fork_that_copies_goes_on_in_pages_of_its_own():
    now = footprint(small(8), context=100, max_context=500)
    later = footprint(small(8), context=150, max_context=500)

    assert now.session.pages_held + 3 * later.session.pages_held == now.forks_held(
        3, shares_pages=False, written=50
    )


@pytest.mark.parametrize("written", [-1, 401, True, 1.5])
def test_tokens_that_no_fork_can_take_are_refused(written):
    now = footprint(small(8), context=100, max_context=500)
    with pytest.raises(ArgumentError, match="written"):
        now.forks_held(1, shares_pages=True, written=written)


# refusals


@pytest.mark.parametrize(
    ("argument", "least"),
    [
        ("context", 0),
        ("sessions", 1),
        ("slack", 0),
        ("step", 1),
        ("page_nbytes", 1),
        ("ring_page_nbytes", 1),
        ("max_context", 1),
        ("row_floor", 1),
        ("cuts", 0),
    ],
)
def test_an_impossible_number_is_refused_by_its_name(argument, least):
    for number in (least - 1, 2**62, 1.0, True, "1"):
        with pytest.raises(ArgumentError) as refused:
            footprint(MUSE, **({"context": 100} | {argument: number}))

        assert argument == refused.value.argument
        assert f"a whole number within [{least}, 2^62)" == refused.value.expected
        assert number is refused.value.got


def test_the_least_and_the_largest_numbers_are_taken():
    last = 2**62 - 1
    least = footprint(
        small(8), context=0, sessions=1, slack=0, step=1, page_nbytes=1, row_floor=1, cuts=0
    )

    assert 0 == least.session.rows_held
    assert last == footprint(small(8), context=last).max_context


def test_a_context_beyond_max_context_is_refused():
    with pytest.raises(ArgumentError, match="context: expected at most 99, got 100"):
        footprint(MUSE, context=100, max_context=99)
    assert 100 == footprint(MUSE, context=100, max_context=100).context


@pytest.mark.parametrize(
    "layout",
    [{"sliding": "NHD"}, {SLIDING: "HDN"}, {FULL: None}],
    ids=["kind", "name", "none"],
)
def test_an_unknown_layout_is_refused(layout):
    with pytest.raises(ArgumentError) as refused:
        footprint(MUSE, context=1, layout=layout)

    assert ("layout", layout) == (refused.value.argument, refused.value.got)
    assert "['full_attention', 'sliding_attention'] to 'HND' or 'NHD'" == refused.value.expected
