"""Taking tokens back over several calls, and changing a batch, beside the stock cache."""

import random
from functools import partial

import pytest
import torch

import zoo
from kvplane.errors import ArgumentError, PositionError, WindowLost
from kvplane.integrations.transformers import HybridCache
from zoo import modes

torch.set_num_threads(1)

WINDOW = zoo.WINDOW
# rows only; rows read by several layers; rows and convolutions
RECORDED = zoo.among("muse_glimmer", "gemma4_text_shared", "mimo_v2_flash", "lfm2", "lfm3")


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RECORDED)
def test_calls_and_crops_in_any_order_are_the_stock_caches(name, seed):
    model = zoo.build(name)
    stock, cache = modes.stock(model), HybridCache(model)
    generator = random.Random(seed)
    for each in (stock, cache):
        each.activate_past_recording()
    ids = zoo.text(200, seed=seed)
    since_crop = 0
    for _ in range(24):
        if since_crop and (not modes.LATE or generator.random() < 0.4):
            # lfm3's convolutions remember only what came since the last crop
            count = generator.randint(0, min(since_crop, WINDOW))
            for each in (stock, cache):
                each.crop(-count)
            since_crop = 0
        count = generator.choice([1, 1, 1, 2, 5, 12])
        part = ids[:, cache.seen : cache.seen + count]
        expected = modes.call(model, stock, part)
        since_crop += count

        assert torch.equal(expected, modes.call(model, cache, part))
        assert stock.get_seq_length() == cache.seen


def test_an_assistants_own_cache_takes_back_many_single_tokens_at_once():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(60)
    cache.activate_past_recording()
    modes.calls(model, cache, ids, [30, *[1] * 6])
    cache.crop(-5)
    found = modes.calls(model, cache, ids[:, 31:], [1] * 12)

    assert ids[0, :43].tolist() == cache.tokens
    # what is left was made by these calls
    assert equal(modes.calls(model, modes.stock(model), ids, [30, 1, *[1] * 12])[2:], found)


def test_recording_that_nobody_ends_keeps_at_most_a_window_a_layer():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    found = modes.generate(model, cache, zoo.text(6).repeat(1, 4), prompt_lookup_num_tokens=3)

    # transformers leaves the recording on
    assert cache.is_recording
    kept = []
    ids = found[0][:, -1:]
    for _ in range(3 * WINDOW):
        ids = modes.call(model, cache, ids)[:, -1:].argmax(-1)
        kept.append(cache.session.undo.nbytes)
    row_nbytes = 2 * 2 * 16 * 4

    assert max(kept) <= 6 * (WINDOW + 1) * row_nbytes
    assert kept[-1] == kept[-5]
    cache.crop(0)
    assert 0 == cache.session.undo.nbytes


def test_recording_is_ended_by_each_layers_own_attribute_as_transformers_does():
    cache = HybridCache(zoo.configuration("muse_glimmer"))
    cache.activate_past_recording()

    assert [True] * 8 == [layer.record_past for layer in cache.layers]
    for layer in cache.layers:
        layer.record_past = False

    assert not cache.is_recording


def test_more_than_was_recorded_is_refused_and_changes_nothing():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(60)
    modes.call(model, cache, ids[:, :30])
    cache.activate_past_recording()
    modes.calls(model, cache, ids[:, 30:], [1] * 6)
    with pytest.raises(WindowLost) as refusal:
        cache.crop(-9)

    assert 27 == refusal.value.position
    assert 36 == cache.seen
    expected = modes.calls(model, modes.stock(model), ids, [30, *[1] * 12])[-6:]
    assert equal(expected, modes.calls(model, cache, ids[:, 36:], [1] * 6))


def test_slack_makes_a_rewind_lossless_without_recording():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model, slack=9)
    ids = zoo.text(60)
    modes.calls(model, cache, ids, [30, *[1] * 9])
    cache.rewind(30)
    with pytest.raises(ArgumentError):
        cache.rewind(31)
    expected = modes.calls(model, modes.stock(model), ids, [30, 1, 1, 1])[1:]

    assert equal(expected, modes.calls(model, cache, ids[:, 30:], [1, 1, 1]))


PLACES = (torch.tensor([0] * 4), torch.tensor([3, 1]), torch.tensor([0]))
BATCHED = zoo.among("muse_glimmer", "gemma4_text_shared", "lfm2", "lfm3", "qwen3_next", "lara_mini")
STATEFUL = zoo.among("lfm2", "lfm3", "qwen3_next", "lara_mini")


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_that_is_reordered_between_calls_is_the_stock_caches(name):
    model = zoo.build(name)
    stock, cache = modes.stock(model), HybridCache(model)
    ids = zoo.text(60, batch=3)
    generator = random.Random(5)
    sizes = [11, 1, 1, 4, 1, 20, 1, 1]
    first = 0
    for size in sizes:
        part = ids[:, first : first + size]
        first += size

        assert torch.equal(modes.call(model, stock, part), modes.call(model, cache, part))
        places = torch.tensor([generator.randrange(3) for _ in range(3)])
        for each in (stock, cache):
            each.reorder_cache(places)


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_can_be_repeated_and_thinned_out(name):
    model = zoo.build(name)
    stock, cache = modes.stock(model), HybridCache(model)
    ids = zoo.text(40, batch=6)
    found = []
    # transformers' own layers with states can be reordered, but not repeated or selected
    changes = {
        stock: [lambda each=place: stock.reorder_cache(each) for place in PLACES],
        cache: [
            lambda: cache.batch_repeat_interleave(4),
            lambda: cache.batch_select_indices(PLACES[1]),
            lambda: cache.batch_select_indices(torch.tensor([True, False])),
        ],
    }
    for each, (repeat, select, single) in changes.items():
        logits = modes.calls(model, each, ids[:1], [11, 1])
        repeat()
        logits += modes.calls(model, each, ids[:4, 12:], [1, 5, 1])
        select()
        logits += modes.calls(model, each, ids[:2, 19:], [1, 9, 1])
        single()
        logits += modes.calls(model, each, ids[:1, 30:], [1, 1])
        found.append(logits)

    assert equal(*found)
    assert 1 == cache.batch_size
    first, other = ids[0, :12].tolist(), ids[3, 12:19].tolist()
    assert [*first, *other, *ids[0, 19:32].tolist()] == cache.tokens


def test_sequences_that_are_not_there_cannot_be_chosen():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(5, batch=2))
    for places in ([2], [-1], []):
        with pytest.raises(ArgumentError):
            cache.batch_select_indices(torch.tensor(places, dtype=torch.long))

    assert (5, 2) == (cache.seen, cache.batch_size)
    modes.call(model, cache, zoo.text(1, batch=2))


def test_the_old_batchs_memory_is_given_back():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(5, batch=2))
    cache.batch_select_indices(torch.tensor([1]))

    assert 1 == len(cache.store.sessions)


# states beside the rows


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_that_cannot_go_back_is_refused_by_its_layers(name):
    model = zoo.build(name)
    cache = HybridCache(model)
    ids = zoo.text(40)
    modes.calls(model, cache, ids, [5, 2])
    stateful = [layer for layer, linear in enumerate(cache.is_linear) if linear]
    with pytest.raises(PositionError) as refusal:
        cache.rewind(4)

    assert f"layers {stateful} keep one running state" in str(refusal.value)
    expected = modes.calls(model, modes.stock(model), ids, [5, 2, 1, 1])[2:]
    assert equal(expected, modes.calls(model, cache, ids[:, 7:], [1, 1]))


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("size", [1, 12])
def test_the_whole_last_call_can_always_be_taken_back(name, size):
    model = zoo.build(name)
    cache = HybridCache(model)
    ids = zoo.text(60)
    modes.calls(model, cache, ids, [21, 1])
    for _ in range(2):
        modes.call(model, cache, zoo.text(size, seed=7))
        cache.crop(-size)
    expected = modes.calls(model, modes.stock(model), ids, [21, 1, 1, 9, 1])[2:]

    assert 22 == cache.seen
    assert equal(expected, modes.calls(model, cache, ids[:, 22:], [1, 9, 1]))


def test_a_state_that_the_model_keeps_to_itself_is_refused_everywhere():
    for name in zoo.among("recurrent_gemma"):
        model = zoo.build(name)
        cache = HybridCache(model)
        modes.call(model, cache, zoo.text(5, batch=2))
        doors = {
            "fork": cache.fork,
            "going back": partial(cache.crop, -2),
            "reordering": partial(cache.reorder_cache, torch.tensor([1, 0])),
            "another batch": partial(cache.batch_repeat_interleave, 2),
            "saving": cache.states,
        }
        for what, door in doors.items():
            with pytest.raises(PositionError, match=f"{what}: the model itself keeps"):
                door()

        assert (5, 2) == (cache.seen, cache.batch_size)


@pytest.mark.parametrize("name", ["muse_glimmer", *STATEFUL])
def test_inference_mode_changes_nothing(name):
    model = zoo.build(name)
    found = []
    ids = zoo.text(60)
    with torch.inference_mode():
        for cache in (modes.stock(model), HybridCache(model)):
            found.append([])
            for part in torch.split(ids, [21, 1, 1, 9, 28], dim=1):
                given = {modes.keyword(model): cache, "use_cache": True}
                found[-1].append(model(input_ids=part, **given).logits)

    assert equal(*found)


@pytest.mark.parametrize("name", ["muse_glimmer", "cwm", "mistral"])
def test_a_padded_batch_is_split_into_caches_that_go_on_alone(name):
    model = zoo.build(name)
    cache = HybridCache(model)
    ids, mask = modes.padded(19, 12, 3)
    out = modes.generate(model, cache, ids, attention_mask=mask, max_new_tokens=12)[0]
    parts = cache.split()

    assert [30, 23, 14] == [part.seen for part in parts]
    assert cache.seen == 30
    for row, pad, part in zip(out, (0, 7, 16), parts, strict=True):
        assert row[pad:-1].tolist() == part.tokens
        assert 0 == part.session.ledger.canonical
        # the rows are the batch's own, to the bit
        for layer in range(len(part.layers)):
            keys, values = part.rows(layer)
            whole = cache.rows(layer)
            assert torch.equal(whole[0][parts.index(part), :, -keys.shape[2] :], keys[0])
            assert torch.equal(whole[1][parts.index(part), :, -values.shape[2] :], values[0])
        longer = torch.cat([row[pad:][None], zoo.text(7, seed=3)], dim=1)
        text = torch.ones_like(longer)
        modes.generate(model, part, longer, attention_mask=text, max_new_tokens=3)


def test_a_batch_with_states_beside_its_rows_is_not_split():
    model = zoo.build("lfm2")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(5, batch=2))
    with pytest.raises(PositionError, match="cannot be split"):
        cache.split()


def test_padding_that_is_not_known_is_not_stripped():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(3, batch=2), position_ids=torch.zeros(2, 3).long())
    with pytest.raises(ArgumentError, match="tell padding from text"):
        cache.split()
    # numbered from the first row on, padding or not
    cache = HybridCache(model)
    ids, mask = modes.padded(9, 5)
    modes.call(model, cache, ids, attention_mask=mask)
    with pytest.raises(ArgumentError, match="tell padding from text"):
        cache.split()
