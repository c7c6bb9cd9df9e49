"""Acceptance A10: what the plan says is what the store says and the system gives."""

import gc
from collections import defaultdict

import pytest
import torch

from kvplane import KVStore
from kvplane.footprint import footprint
from kvplane.geometry import FULL, SLIDING, ModelGeometry, preset_names
from kvplane.plane import Layout
from small_models import small

torch.set_num_threads(1)

MEMORIES = ("heap", "mapped")


def plan_of(store, *, context, **arguments):
    """The plan of a store as it is configured."""
    backend = store.memory_choice.backend
    return footprint(
        store.geometry,
        context=context,
        max_context=store.max_context,
        slack=store.slack,
        row_floor=store.row_floor,
        page_nbytes=backend.page_nbytes,
        ring_page_nbytes=backend.ring_page_nbytes,
        layout={kind: layout.value for kind, layout in store.plan.layouts.items()},
        **arguments,
    )


def rows_for(group, num_tokens):
    dtype = getattr(torch, group.dtype)
    shape = (num_tokens, group.num_kv_heads)
    return (
        torch.ones(*shape, group.head_dim, dtype=dtype),
        torch.ones(*shape, group.value_head_dim, dtype=dtype),
    )


def take(session, num_tokens, **arguments):
    """A step that is written and left open."""
    step = session.step(num_tokens, **arguments)
    step.__enter__()
    for group in session.geometry.groups:
        key, value = rows_for(group, num_tokens)
        for layer in group.layers:
            step.write(layer, key, value)
    return step


def check(store, session, plan, *, scratch=True):
    (held,) = store.memory().sessions

    assert {p.group.id: p.capacity for p in plan.groups} == store.describe().capacities
    for part in plan.groups:
        expected, got = part.nbytes, held[part.group.id]

        assert (expected.reserved, expected.rows_held, expected.pages_held) == (
            got.reserved,
            got.rows_held,
            got.pages_held,
        ), part.group.id
        if scratch:
            assert expected.scratch == got.scratch
    assert session.position == plan.context


@pytest.mark.parametrize("slack", [0, 16])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", preset_names())
def test_a10_every_preset_is_reserved_and_held_as_planned(name, memory, slack):
    geometry = ModelGeometry.preset(name)
    with KVStore(geometry, max_context=131_072, memory=memory, slack=slack) as store:
        session = store.open()
        check(store, session, plan_of(store, context=0))
        for num_tokens in (1, 2, 30):
            take(session, num_tokens).commit()
            check(store, session, plan_of(store, context=session.position), scratch=False)
        del session
    gc.collect()


@pytest.mark.parametrize("slack", [0, 16])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("row", [16, 192])
@pytest.mark.parametrize("window", [8, 256, 341])
def test_a10_a_ring_that_turns_is_held_as_planned(window, row, memory, slack):
    geometry = small(window, row=row, num_sliding=2)
    with KVStore(geometry, max_context=1_000, memory=memory, slack=slack) as store:
        session = store.open()
        for num_tokens in (1, 6, 1, 1, 100, 200, 31, 60, 500):
            take(session, num_tokens).commit()
            check(store, session, plan_of(store, context=session.position), scratch=False)


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("first", [0, 5, 8, 9, 50])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 12, 30])
def test_a10_the_journal_of_an_open_step_is_as_planned(first, num_tokens, slack, speculative):
    geometry = small(8, num_sliding=3)
    with KVStore(geometry, max_context=1_000, memory="heap", slack=slack) as store:
        session = store.open()
        if first:
            take(session, first).commit()
        step = take(session, num_tokens, speculative=speculative)
        (held,) = store.memory().sessions
        plan = plan_of(store, context=first + num_tokens, step=num_tokens, speculative=speculative)

        assert {part.group.id: part.nbytes.scratch for part in plan.groups} == {
            name: got.scratch for name, got in held.items()
        }
        step.abort()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("sliding", list(Layout))
@pytest.mark.parametrize("full", list(Layout))
def test_a10_pages_are_planned_in_either_layout(full, sliding, memory):
    geometry = ModelGeometry.uniform(
        [SLIDING, FULL],
        sliding_window=300,
        num_kv_heads=3,
        head_dim=8,
        value_head_dim=4,
        dtype="float16",
    )
    layout = {SLIDING: sliding, FULL: full}
    with KVStore(geometry, max_context=2_000, memory=memory, layout=layout) as store:
        session = store.open()
        for num_tokens in (1, 50, 200, 249, 700):
            take(session, num_tokens).commit()
            check(store, session, plan_of(store, context=session.position), scratch=False)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a10_the_plan_is_the_sum_of_the_tensors_bytes(memory):
    geometry = small(8, num_sliding=3)
    with KVStore(geometry, max_context=100, memory=memory) as store:
        session = store.open()
        sizes = defaultdict(int)
        for layer, plane in session.planes.items():
            capacity = store.plan.capacities[geometry.group_of(layer).id]
            for rows in (plane.key, plane.value):
                sizes[geometry.layers[layer].kind] += rows.narrow(1, 0, capacity).nbytes
        plan = plan_of(store, context=0)

        assert {kind: plan.kind(kind).reserved for kind in (SLIDING, FULL)} == dict(sizes)


def test_a10_rows_of_layers_that_share_are_planned_once():
    layers = small(8).layers
    facts = ModelGeometry(layers=layers, dtype="float16").to_dict()
    facts["layers"] += [{**facts["layers"][0], "shares_kv_with": 0}]
    geometry = ModelGeometry.from_dict(facts)
    with KVStore(geometry, max_context=100, memory="heap") as store:
        session = store.open()
        take(session, 20).commit()

        check(store, session, plan_of(store, context=20))


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(("memory", "shares"), [("heap", False), ("mapped", True)])
@pytest.mark.parametrize("context", [3, 100, 300, 2_000])
def test_a10_forks_hold_what_is_planned(context, memory, shares, layout):
    geometry = small(256, row=192, num_sliding=2, num_kv_heads=3, head_dim=16)
    layouts = {SLIDING: layout, FULL: layout}
    with KVStore(geometry, max_context=4_000, memory=memory, layout=layouts) as store:
        session = store.open()
        take(session, context).commit()
        forks = [session.fork() for _ in range(3)]
        plan = plan_of(store, context=context)

        assert plan.forks_held(3, shares_pages=shares) == store.memory().pages_held
        written = 0
        for more in (1, 1, 30, 200, 300):
            written += more
            for fork in forks:
                take(fork, more).commit()

            assert (
                plan.forks_held(3, shares_pages=shares, written=written)
                == store.memory().pages_held
            )


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("first", "num_tokens"), [(0, 5), (0, 20), (5, 5), (50, 5), (50, 20)])
def test_a10_a_gathered_view_is_as_large_as_planned(first, num_tokens, memory):
    geometry = small(8, num_sliding=2)
    with KVStore(geometry, max_context=1_000, memory=memory) as store:
        session = store.open()
        if first:
            take(session, first).commit()
        with session.step(num_tokens) as step:
            key, value = rows_for(geometry.groups[0], num_tokens)
            step.write(0, key, value)
            gathered = sum(part.nbytes for part in step.view(0).gather())
            step.abort()
        plan = plan_of(store, context=first + num_tokens, step=num_tokens, gather=True)

        assert plan.session.gather == gathered


@pytest.mark.parametrize("first", [0, 5, 50])
def test_a10_rows_kept_at_cuts_inside_a_step_are_as_planned(first):
    geometry = small(8, num_sliding=2)
    with KVStore(geometry, max_context=1_000, memory="heap") as store:
        session = store.open()
        if first:
            take(session, first).commit()
        cuts = (first + 18, first + 19)
        take(session, 20, capture=cuts).commit()
        plan = plan_of(store, context=first + 20, step=20, cuts=2)

        assert plan.session.capture == store.memory().captures
