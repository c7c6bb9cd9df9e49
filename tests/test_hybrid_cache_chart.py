"""When a step begins and ends: the state chart of `chart.py`, arrow by arrow."""

import copy

import pytest
import torch

import zoo
from kvplane.errors import (
    ArgumentError,
    ContextFull,
    LayerRepeated,
    LimitReached,
    StepIncomplete,
    TensorMismatch,
)
from kvplane.integrations.transformers import HybridCache
from kvplane.step import Step

torch.set_num_threads(1)

LAYERS = range(8)
WINDOW = zoo.WINDOW


def a_cache(**options):
    """A cache of the muse_glimmer shapes: layers SSSFSSSF, window 8."""
    return HybridCache(zoo.configuration("muse_glimmer"), **options)


def rows(first, count, batch=1):
    """Keys whose every element is its position; values are their negatives."""
    key = torch.arange(first, first + count, dtype=torch.float32)
    key = key[None, None, :, None].expand(batch, 2, count, 16).contiguous()
    return key, -key


def update(cache, layers, first, count, **facts):
    """The updates of a call over some of the layers; what the last of them returned."""
    out = None
    for layer in layers:
        out = cache.update(*rows(first, count), layer, kwargs=facts)
    return out


def held(cache, layer):
    """The positions whose rows a layer holds."""
    keys, values = cache.rows(layer)
    if keys is None:
        return []
    assert torch.equal(-keys, values)
    return keys[0, 0, :, 0].int().tolist()


def snapshot(cache):
    return cache.seen, [held(cache, layer) for layer in LAYERS]


def test_a_written_step_counts_as_seen_and_is_committed_by_the_next_calls_first_layer():
    cache = a_cache()
    update(cache, LAYERS, 0, 3)

    assert (3, 0) == (cache.seen, cache._chart.session.position)

    update(cache, [0], 3, 1)

    assert (3, 3) == (cache.seen, cache._chart.session.position)


def test_tokens_of_an_open_step_are_not_seen_yet():
    cache = a_cache()
    update(cache, LAYERS, 0, 3)
    update(cache, range(7), 3, 2)

    assert 3 == cache.seen == cache.get_seq_length() == cache.layers[0].get_seq_length()

    update(cache, [7], 3, 2)

    assert 5 == cache.seen == cache.get_seq_length() == cache.layers[7].get_seq_length()


def test_each_layer_returns_what_its_queries_see():
    cache = a_cache()
    for first, count in ((0, 5), (5, 1), (6, 4), (10, 1), (11, 20), (31, 1)):
        for layer in LAYERS:
            keys, values = update(cache, [layer], first, count)
            oldest = 0 if layer in {3, 7} else max(0, first - (WINDOW - 1))
            expected = list(range(oldest, first + count))

            assert expected == keys[0, 1, :, 3].int().tolist()
            assert torch.equal(-keys, values)


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("start", [4, 30])
@pytest.mark.parametrize("died_after", [1, 4, 7])
def test_a_call_that_died_between_two_layers_is_taken_back_by_the_next(start, died_after, count):
    cache = a_cache()
    update(cache, LAYERS, 0, start)
    before = snapshot(cache)
    update(cache, range(died_after), start, count)
    keys, _ = update(cache, [0], start, 1)

    assert start == keys[0, 0, -1, 0]

    update(cache, range(1, 8), start, 1)
    cache.crop(-1)

    # what the position needs is as before; rows outside the window may be gone
    assert before[0] == cache.seen
    for layer, positions in enumerate(before[1]):
        needed = positions if layer in {3, 7} else positions[-(WINDOW - 1) :]
        assert needed == held(cache, layer)[-len(needed) :]


DOORS = {
    "session": lambda cache: cache.session,
    "settle": lambda cache: cache.settle(),
    "tokens": lambda cache: cache.tokens,
    "rows": lambda cache: cache.rows(3),
    "keys": lambda cache: cache.layers[3].keys,
    "crop": lambda cache: cache.crop(0),
    "rewind": lambda cache: cache.rewind(cache.seen),
    "fork": lambda cache: cache.fork(),
    "deepcopy": copy.deepcopy,
    "record": lambda cache: cache.record(on=True),
    "activate_past_recording": lambda cache: cache.activate_past_recording(),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(1),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([0])),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("died_after", [1, 7])
def test_every_door_from_outside_takes_a_dead_call_back(door, died_after):
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    update(cache, range(died_after), 20, 3)
    DOORS[door](cache)

    assert cache._chart.step is None
    assert 20 == cache.seen
    assert list(range(20)) == held(cache, 3)
    assert list(range(13, 20)) == held(cache, 0)[-7:]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_from_outside_commits_a_written_step(door):
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    update(cache, LAYERS, 20, 3)
    DOORS[door](cache)

    assert cache._chart.step is None
    assert 23 == cache.seen == cache._chart.session.position
    assert list(range(23)) == held(cache, 7)


def test_a_reset_empties_whatever_was_open():
    for layers in (range(3), LAYERS):
        cache = a_cache()
        update(cache, LAYERS, 0, 20)
        update(cache, layers, 20, 3)
        cache.reset()

        assert (0, [[]] * 8) == snapshot(cache)
        update(cache, LAYERS, 0, 2)
        assert (2, [[0, 1]] * 8) == snapshot(cache)


def test_the_stores_limit_refuses_a_call_and_the_cache_stays_usable():
    row_nbytes = 2 * 2 * 16 * 4
    # six rings of eight rows, and two full layers of 22
    cache = a_cache(limit=row_nbytes * (6 * WINDOW + 2 * 22))
    update(cache, LAYERS, 0, 20)
    with pytest.raises(LimitReached):
        update(cache, LAYERS, 20, 3)

    assert 20 == cache.seen
    update(cache, LAYERS, 20, 1)
    update(cache, LAYERS, 21, 1)
    assert list(range(22)) == held(cache, 3)


@pytest.mark.parametrize("count", [1, 5, 30])
@pytest.mark.parametrize("kept", [0, 1, 4])
def test_a_crop_of_a_written_step_keeps_its_first_tokens(count, kept):
    if kept >= count:
        return
    cache = a_cache()
    cache.activate_past_recording()
    update(cache, LAYERS, 0, 20)
    update(cache, LAYERS, 20, count)
    cache.crop(kept - count)
    stop = 20 + kept

    assert stop == cache.seen
    assert list(range(stop)) == held(cache, 3)
    assert list(range(stop - (WINDOW - 1), stop)) == held(cache, 0)[-(WINDOW - 1) :]


def test_a_step_that_fits_its_ring_can_be_cropped_without_recording():
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    update(cache, LAYERS, 20, 6)
    cache.crop(-4)

    assert 22 == cache.seen
    assert list(range(15, 22)) == held(cache, 0)[-7:]


def test_an_interrupt_inside_a_write_leaves_the_cache_as_before_the_call(monkeypatch):
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    written = Step.write

    def interrupted(step, layer, key, value):
        if layer == 5:
            raise KeyboardInterrupt
        written(step, layer, key, value)

    monkeypatch.setattr(Step, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        update(cache, LAYERS, 20, 12)
    monkeypatch.undo()

    assert cache._chart.step is None
    assert 20 == cache.seen
    assert list(range(13, 20)) == held(cache, 0)[-7:]
    update(cache, LAYERS, 20, 12)
    assert list(range(32)) == held(cache, 3)


def test_a_call_that_passes_the_first_layer_over_is_refused():
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    with pytest.raises(StepIncomplete) as refusal:
        update(cache, [2], 20, 1)

    assert (0, 1) == refusal.value.layers
    assert 20 == cache.seen


def test_layers_that_go_on_after_a_door_ended_their_call_are_refused():
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    update(cache, range(4), 20, 1)
    cache.settle()
    with pytest.raises(StepIncomplete):
        update(cache, [4], 20, 1)

    assert 20 == cache.seen


def test_a_layer_that_comes_twice_in_one_call_is_refused_and_the_call_taken_back():
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    update(cache, range(4), 20, 1)
    with pytest.raises(LayerRepeated) as refusal:
        update(cache, [2], 20, 1)

    assert 2 == refusal.value.layer
    assert (None, 20) == (cache._chart.step, cache.seen)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("key shape", lambda key, value: (key[:, :1], value)),
        ("value shape", lambda key, value: (key, value[..., :8])),
        ("key dtype", lambda key, value: (key.half(), value)),
        ("value dtype", lambda key, value: (key, value.bfloat16())),
        ("key batch", lambda key, value: (key.repeat(2, 1, 1, 1), value)),
        ("value batch", lambda key, value: (key, value.repeat(2, 1, 1, 1))),
        ("key device", lambda key, value: (key.to("meta"), value)),
    ],
)
def test_a_tensor_that_the_store_would_hold_otherwise_is_refused_and_the_call_taken_back(
    what, change
):
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    update(cache, range(4), 20, 2)
    with pytest.raises(TensorMismatch) as refusal:
        cache.update(*change(*rows(20, 2)), 4)

    assert (4, what) == (refusal.value.layer, refusal.value.what)
    assert (None, 20) == (cache._chart.step, cache.seen)


def test_float32_rows_are_not_rounded_into_a_cache_that_began_in_bfloat16():
    cache = a_cache()
    for layer in LAYERS:
        cache.update(*(each.bfloat16() for each in rows(0, 3)), layer)
    for wrong in (0, 1):
        pair = [each.bfloat16() for each in rows(3, 1)]
        pair[wrong] = pair[wrong].float()
        with pytest.raises(TensorMismatch, match=r"expected torch\.bfloat16, got torch\.float32"):
            cache.update(*pair, 0)

        assert 3 == cache.seen


def test_a_batch_that_grows_in_the_middle_is_refused():
    cache = a_cache()
    update(cache, LAYERS, 0, 20)
    with pytest.raises(TensorMismatch, match="batch: expected 1, got 3"):
        cache.update(*rows(20, 1, batch=3), 0)

    assert 20 == cache.seen


def test_the_context_ends_with_an_error_and_the_cache_stays_usable():
    cache = a_cache(max_context=24)
    update(cache, LAYERS, 0, 22)
    with pytest.raises(ContextFull) as refusal:
        update(cache, LAYERS, 22, 3)

    assert (22, 3, 24) == (
        refusal.value.position,
        refusal.value.num_tokens,
        refusal.value.max_context,
    )
    update(cache, LAYERS, 22, 2)
    assert list(range(24)) == held(cache, 3)


def test_more_tokens_than_there_are_cannot_be_taken_back():
    cache = a_cache()
    update(cache, LAYERS, 0, 5)
    for count in (-6, 1):
        with pytest.raises(ArgumentError, match=r"within \[-5, 0\]"):
            cache.crop(count)

    assert (5, [list(range(5))] * 8) == snapshot(cache)


def test_an_empty_cache_can_be_asked_everything():
    cache = a_cache()
    for door in DOORS.values():
        door(cache)
    cache.reset()

    assert (0, None, None, -1) == (cache.seen, cache.session, cache.store, cache.batch_size)
    assert (None, None) == (cache.layers[0].keys, cache.layers[0].values)
