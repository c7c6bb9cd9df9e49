"""Calls of real models that die: in any layer, by an error or Ctrl-C."""

import pytest
import torch

import zoo
from kvplane.errors import WindowLost
from kvplane.integrations.transformers import HybridCache
from zoo import modes

torch.set_num_threads(1)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(
    "name",
    zoo.among("muse_glimmer", "gemma4_text_shared", "lfm2", "lfm3", "qwen3_next", "lara_mini"),
)
@pytest.mark.parametrize(("first", "size"), [(5, 1), (30, 1), (21, 9)])
def test_a_model_whose_call_raised_in_any_layer_goes_on_as_if_it_had_not(
    name, first, size, watched
):
    model = zoo.build(name)
    layers = decoder_layers(model)
    sizes = [first, *[size] * len(layers)]
    ids = zoo.text(sum(sizes))
    expected = modes.calls(model, modes.stock(model), ids, sizes)
    # made for the config alone, nothing reports that a call failed
    cache = HybridCache(model if watched else model.config)
    found = modes.calls(model, cache, ids, [first])
    for number, layer in enumerate(layers):
        part = ids[:, cache.seen : cache.seen + size]
        before = cache.seen
        hook = layer.register_forward_hook(raise_error)
        with pytest.raises(ZeroDivisionError):
            modes.call(model, cache, part)
        hook.remove()
        if not watched and number >= last_with_rows_or_state(cache):
            # every row and state was there before the error: the call counts as seen
            assert before + size == cache.seen
            cache.crop(-size)
        found.append(modes.call(model, cache, part))

    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", zoo.among("lfm2", "lfm3", "qwen3_next", "lara_mini"))
def test_a_fork_and_a_save_after_a_dead_call_have_the_states_before_it(name):
    model = zoo.build(name)
    cache = HybridCache(model.config)
    ids = zoo.text(30)
    modes.calls(model, cache, ids, [12, 1])
    before = {key: tensor.clone() for key, tensor in cache.states().items()}
    for layer in decoder_layers(model)[:-1]:
        for door in (cache.states, lambda: cache.fork().states()):
            hook = layer.register_forward_hook(raise_error)
            with pytest.raises(ZeroDivisionError):
                modes.call(model, cache, ids[:, 13:14])
            hook.remove()
            after = door()

            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("layer", [0, 3, 7])
@pytest.mark.parametrize("token", [1, 9, 30])
def test_ctrl_c_in_generate_leaves_every_token_that_was_read(token, layer):
    model = zoo.build("muse_glimmer")
    ids = zoo.text(21)
    expected = modes.generate(model, modes.stock(model), ids)[0]
    # a call that is taken back may cost a ring the row below its window; slack has it to spare
    cache = HybridCache(model, slack=1)
    countdown = iter(range(token, -1, -1))

    def interrupt(*args):
        del args
        if next(countdown) == 0:
            raise KeyboardInterrupt

    hook = decoder_layers(model)[layer].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        modes.generate(model, cache, ids)
    hook.remove()
    # a call counts once its last layer has its rows; this one died after that, or before
    seen = 20 + token + (layer == 7)

    assert seen == cache.seen
    assert expected[0, :seen].tolist() == cache.tokens
    # the last token that was read is read again: its call gives the logits that were lost
    prompt = expected[:, :seen]
    mask = torch.ones_like(prompt)
    rest = expected.shape[1] - seen
    out = modes.generate(model, cache, prompt, max_new_tokens=rest, attention_mask=mask)
    assert torch.equal(expected, out[0])


def test_without_slack_the_last_token_of_a_call_that_died_may_not_be_read_again():
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids = zoo.text(30)
    modes.calls(model, cache, ids, [21, 1])
    hook = decoder_layers(model)[4].register_forward_hook(raise_error)
    with pytest.raises(ZeroDivisionError):
        modes.call(model, cache, ids[:, 22:23])
    hook.remove()
    with pytest.raises(WindowLost) as refusal:
        modes.generate(model, cache, ids[:, :22], max_new_tokens=3)

    assert 21 == refusal.value.position
    # one token more is all it needs
    stock = modes.stock(model)
    modes.calls(model, stock, ids, [21, 1])
    expected, found = (
        modes.generate(model, each, ids[:, :23], max_new_tokens=3) for each in (stock, cache)
    )
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", zoo.among("muse_glimmer", "lfm2", "qwen3_next"))
def test_an_empty_cache_takes_any_batch_and_dtype(name):
    cache = None
    for dtype, batch in ((torch.float32, 2), (torch.bfloat16, 1), (torch.float32, 3)):
        model = zoo.build(name, dtype)
        ids = zoo.text(12, batch=batch)
        if cache is None:
            cache = HybridCache(model.config)
        # a first call that dies, and a reset, leave nothing behind
        hook = decoder_layers(model)[5].register_forward_hook(raise_error)
        with pytest.raises(ZeroDivisionError):
            modes.call(model, cache, zoo.text(12, batch=batch + 1))
        hook.remove()
        left = cache.store
        expected = modes.calls(model, modes.stock(model), ids, [9, 1, 1, 1])
        found = modes.calls(model, cache, ids, [9, 1, 1, 1])

        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert ([], 1) == (left.sessions, len(cache.store.sessions))
        cache.reset()


def test_a_reset_goes_on_recording():
    cache = HybridCache(zoo.configuration("lfm2"))
    cache.activate_past_recording()
    cache.reset()

    assert cache.is_recording
    assert [True] * 8 == [layer.record_past for layer in cache.layers]


def last_with_rows_or_state(cache):
    return max(*cache._chart.owned, *cache._chart.running.layers, 0)


def raise_error(*args):
    del args
    raise ZeroDivisionError


def decoder_layers(model):
    """The model's layers, first to last."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(next(each for each in lists if len(each) == 8))
