"""What is refused: other texts, other models, replayed positions; and the stock caches' defects."""

import copy
import inspect
import io
import pickle

import pytest
import torch

import zoo
from kvplane.errors import (
    ArgumentError,
    CacheDiscontinuity,
    ContextFull,
    PositionError,
    WindowLost,
)
from kvplane.integrations.transformers import HybridCache
from zoo import modes

torch.set_num_threads(1)


def generated(model, cache, ids, count=10, **options):
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": count, "attention_mask": mask} | options
    return modes.generate(model, cache, ids, **options)


def snapshot(cache):
    session = cache.session
    return cache.seen, session.tokens, {name: c.as_tuple() for name, c in session.cursors.items()}


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# tokens


def test_a_watched_models_cache_knows_its_tokens():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(21)
    out = generated(model, cache, ids)[0]

    # the last token was chosen, not read
    assert out[0, :-1].tolist() == cache.tokens
    assert 30 == cache.seen


def test_tokens_follow_crop_fork_and_beams():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(21)
    modes.calls(model, cache, ids, [5, 3])
    twin = cache.fork()
    cache.crop(-2)
    modes.call(model, cache, ids[:, 10:12])

    assert [*ids[0, :6].tolist(), *ids[0, 10:12].tolist()] == cache.tokens
    assert ids[0, :8].tolist() == twin.tokens

    cache = HybridCache(model)
    best = modes.generate(model, cache, ids, num_beams=3, max_new_tokens=12)[0]

    assert 3 == len(cache.tokens)
    assert ids[0].tolist() == cache.tokens[0][:21] == cache.tokens[2][:21]
    assert (1, 33) == tuple(best.shape)


def test_embeddings_make_a_text_unknown_and_a_reset_known_again():
    model = zoo.build("cohere2")
    cache = HybridCache(model)
    ids = zoo.text(9)
    modes.call(model, cache, ids)
    rows = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        model(inputs_embeds=rows, **{modes.keyword(model): cache})

    assert (18, None) == (cache.seen, cache.tokens)

    cache.reset()
    modes.call(model, cache, ids)

    assert ids[0].tolist() == cache.tokens


def test_embeddings_that_are_not_kept_leave_the_text_known():
    model = zoo.build("cohere2")
    cache = HybridCache(model, max_context=12)
    ids = zoo.text(9)
    modes.call(model, cache, ids)
    rows = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        with pytest.raises(ContextFull):
            model(inputs_embeds=rows, **{modes.keyword(model): cache})
        assert ids[0].tolist() == cache.tokens
        model(inputs_embeds=rows[:, :2], **{modes.keyword(model): cache})
    cache.crop(-2)

    assert ids[0].tolist() == cache.tokens


def test_a_config_alone_watches_nothing():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model.config)
    out = generated(model, cache, zoo.text(21))

    assert "generate" not in model.__dict__
    assert not model._forward_pre_hooks
    assert cache.tokens is None
    assert equal(generated(model, modes.stock(model), zoo.text(21)), out)


# prompts


@pytest.mark.parametrize("place", [0, 7, 20])
def test_a_prompt_with_another_beginning_is_refused_by_the_first_token_that_differs(place):
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(21)
    generated(model, cache, ids)
    before = snapshot(cache)
    other = torch.cat([ids, zoo.text(20, seed=4)], dim=1)
    other[0, place] += 1
    with pytest.raises(PositionError, match=f"at position {place} of") as refusal:
        generated(model, cache, other)

    assert place == refusal.value.position
    assert before == snapshot(cache)


def test_a_prompt_shorter_than_what_is_held_is_refused():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(21)
    modes.call(model, cache, ids)
    before = snapshot(cache)
    with pytest.raises(PositionError, match="has 20 tokens, the cache already holds 21"):
        generated(model, cache, ids[:, :20])

    assert before == snapshot(cache)


def test_only_the_new_tokens_may_be_passed_with_a_mask_for_all():
    model = zoo.build("muse_glimmer")
    first, second = zoo.text(21), zoo.text(9, seed=3)
    whole = torch.cat([first, second], dim=1)
    found = []
    for cache in (modes.stock(model), HybridCache(model)):
        modes.call(model, cache, first)
        found.append(
            modes.generate(
                model, cache, second, attention_mask=torch.ones(1, 30), max_new_tokens=10
            )
        )

    assert equal(*found)
    cache = HybridCache(model)
    modes.call(model, cache, first)
    assert equal(found[0][1:], generated(model, cache, whole)[1:])


def test_a_batch_is_compared_sequence_by_sequence():
    model = zoo.build("muse_glimmer")
    ids, mask = modes.padded(12, 7)
    cache = HybridCache(model)
    first = modes.generate(model, cache, ids, attention_mask=mask, max_new_tokens=8)[0]
    longer = torch.cat([first, zoo.text(4, batch=2, seed=6)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, longer.shape[1] - mask.shape[1]), value=1)
    other = modes.generate(model, cache, longer, attention_mask=mask, max_new_tokens=4)[0]
    other[1, 6] += 1
    mask = torch.nn.functional.pad(mask, (0, 4), value=1)
    with pytest.raises(PositionError, match="at position 6 of sequence 1"):
        modes.generate(model, cache, other, attention_mask=mask)


def test_beams_that_the_cache_was_left_with_are_no_single_conversation():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(21)
    out = modes.generate(model, cache, ids, num_beams=3, max_new_tokens=6)[0]
    longer = torch.cat([out, zoo.text(5, seed=2)], dim=1)
    different = [row for row in cache.tokens if row != out[0, :-1].tolist()]

    assert different
    with pytest.raises(PositionError, match="another text"):
        generated(model, cache, longer, num_beams=3)


# models


def test_another_models_cache_is_refused_and_keeps_its_last_call():
    model, other = zoo.build("muse_glimmer"), zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(21)
    modes.call(model, cache, ids)
    for watched in (False, True):
        if watched:
            HybridCache(other)
        with pytest.raises(ArgumentError, match="another model"):
            modes.call(other, cache, ids[:, :1])

        assert 21 == cache.seen
    expected = modes.calls(model, modes.stock(model), zoo.text(24), [21, 1, 1])
    found = modes.calls(model, cache, zoo.text(24)[:, 21:], [1, 1])
    assert equal(expected[1:], found)


def test_a_part_of_the_model_called_alone_is_refused():
    model = zoo.build("cohere2")
    cache = HybridCache(model)
    with pytest.raises(ArgumentError, match="or of a part of it"):
        modes.call_part(model.model, cache, zoo.text(5))

    assert 0 == cache.seen


def test_a_copied_model_needs_caches_of_its_own():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    twin = copy.deepcopy(model)
    ids = zoo.text(21)
    with pytest.raises(ArgumentError, match="one made for this model"):
        modes.call(twin, cache, ids)
    out = generated(twin, HybridCache(twin), ids)

    assert twin is twin.generate._model
    assert equal(generated(model, cache, ids), out)


def test_a_watched_model_can_be_pickled_and_keeps_its_signature():
    model = zoo.build("cohere2")
    signature = inspect.signature(model.generate)
    HybridCache(model)
    HybridCache(model)

    assert signature == inspect.signature(model.generate)
    assert 1 == len(model._forward_pre_hooks)
    assert pickle.loads(pickle.dumps(model)) is not model  # noqa: S301 - our own bytes


def test_a_cache_itself_is_saved_by_its_own_door_only():
    cache = HybridCache(zoo.configuration("cohere2"))
    with pytest.raises(ArgumentError, match=r"cache\.save"):
        torch.save(cache, io.BytesIO())
    with pytest.raises(ArgumentError, match=r"cache\.fork"):
        copy.copy(cache)


def test_a_cache_is_made_for_a_model_or_a_config():
    for wrong in ([(torch.zeros(1), torch.zeros(1))], None, "muse_glimmer"):
        with pytest.raises(ArgumentError, match="a transformers model or its config"):
            HybridCache(wrong)


def test_a_model_over_several_devices_is_refused_by_name():
    model = zoo.build("cohere2")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ArgumentError, match=r"a device_map over \['0', '1'\]"):
        HybridCache(model)

    assert "generate" not in model.__dict__


# positions


@pytest.mark.parametrize(("first", "count"), [(20, 1), (22, 1), (0, 21), (18, 4), (0, 1)])
def test_a_skipped_or_replayed_position_is_refused_and_changes_nothing(first, count):
    model = zoo.build("muse_glimmer")
    for made_for in (model, model.config) if modes.LATE else (model,):
        cache = HybridCache(made_for)
        ids = zoo.text(30)
        modes.call(model, cache, ids[:, :21])
        places = torch.arange(first, first + count)[None]
        with pytest.raises(CacheDiscontinuity) as refusal:
            modes.call(model, cache, ids[:, :count], position_ids=places)

        assert (21, first) == (refusal.value.expected, refusal.value.got)
        assert 21 == cache.seen
        modes.call(model, cache, ids[:, 21:])
        assert 30 == cache.seen


# defects of the stock caches (numbers as in the record of them)


def test_defect_1_a_cache_made_from_anothers_rows_carries_its_whole_length():
    model = zoo.build("muse_glimmer")
    ids = zoo.text(60)
    cache = HybridCache(model)
    modes.call(model, cache, ids[:, :50])
    copied = HybridCache(model)
    store = copied.made_store(torch.float32, "cpu")
    copied.adopt(store.restore(cache.session.snapshot()))
    sizes = [1] * 10

    assert 50 == copied.seen
    expected = modes.calls(model, modes.stock(model), ids, [50, *sizes])[1:]
    assert equal(expected, modes.calls(model, copied, ids[:, 50:], sizes))
    assert ids[0].tolist() == copied.tokens
    with pytest.raises(ArgumentError, match="an empty cache"):
        copied.adopt(store.restore(cache.session.snapshot()))


def test_defect_2_a_crop_that_a_window_cannot_follow_is_refused_and_the_next_logits_are_right():
    model = zoo.build("muse_glimmer")
    ids = zoo.text(60)
    cache = HybridCache(model)
    modes.calls(model, cache, ids, [50, 1])
    with pytest.raises(WindowLost) as refusal:
        cache.crop(-5)

    assert (46, 39, 43) == (
        refusal.value.position,
        refusal.value.first,
        refusal.value.stop,
    )
    expected = modes.calls(model, modes.stock(model), ids, [50, 1, 1, 1])[2:]
    assert equal(expected, modes.calls(model, cache, ids[:, 51:], [1, 1]))


def test_defect_3_a_crop_is_taken_by_all_layers_or_by_none():
    # a full layer comes first
    model = zoo.build("cwm")
    cache = HybridCache(model)
    modes.calls(model, cache, zoo.text(60), [50, 1])
    before = snapshot(cache)
    with pytest.raises(WindowLost):
        cache.crop(-4)

    assert [51] * 8 == [layer.get_seq_length() for layer in cache.layers]
    assert before == snapshot(cache)


def test_defect_4_a_prompt_that_is_held_whole_runs_its_last_token_again():
    model = zoo.build("muse_glimmer")
    ids = zoo.text(124)
    stock = modes.stock(model)
    stock.activate_past_recording()
    modes.call(model, stock, ids)
    stock.crop(-1)
    for layer in stock.layers:
        layer.record_past = False
    cache = HybridCache(model)
    modes.call(model, cache, ids)
    found = generated(model, cache, ids)

    assert 133 == cache.seen
    assert equal(generated(model, stock, ids), found)


def test_defect_4_also_holds_where_token_ids_are_not_known():
    model = zoo.build("muse_glimmer")
    ids = zoo.text(124)
    cache = HybridCache(model)
    modes.call(model, cache, ids)
    cache.session.ids = None
    generated(model, cache, ids)

    assert 133 == cache.seen
    if modes.LATE:
        # nobody watches: position ids tell
        cache = HybridCache(model.config)
        unwatched = zoo.build("muse_glimmer")
        modes.call(unwatched, cache, ids)
        with pytest.raises(CacheDiscontinuity, match="expected position 124, got 0"):
            generated(unwatched, cache, ids)

        assert 124 == cache.seen


def test_defect_5_unrelated_prompts_are_refused_where_the_stock_cache_goes_on():
    model = zoo.build("muse_glimmer")
    cache, stock = HybridCache(model), modes.stock(model)
    for each in (cache, stock):
        modes.call(model, each, zoo.text(21))
    unrelated = zoo.text(40, seed=9)
    generated(model, stock, unrelated)
    with pytest.raises(PositionError):
        generated(model, cache, unrelated)

    assert zoo.text(21)[0].tolist() == cache.tokens
