"""Loops of one's own: prefill on the canonical schedule, and how a token is chosen."""

import pytest
import torch

import zoo
from kvplane.errors import ArgumentError, ContextFull
from kvplane.integrations.transformers import HybridCache, prefill
from kvplane.integrations.transformers.calls import chosen
from zoo import modes

torch.set_num_threads(1)


@pytest.fixture
def lengths():
    """How many tokens each call of a model read, from now on."""
    read = []

    def note(module, args, kwargs):
        del module, args
        read.append(kwargs["input_ids"].shape[1])

    def begin(model):
        model.register_forward_pre_hook(note, with_kwargs=True)
        return read

    return begin


def test_prefill_reads_whole_chunks_on_their_multiples_and_the_rest_once(lengths):
    model = zoo.build("muse_glimmer")
    ids = zoo.text(70)[0].tolist()
    cache = HybridCache(model)
    prefill(model, cache, ids[:9], chunk=16)
    read, positions = lengths(model), []
    logits = prefill(model, cache, ids, chunk=16, after=positions.append)

    assert ([7, 16, 16, 16, 6], [16, 32, 48, 64, 70]) == (read, positions)
    stock = modes.stock(model)
    parts = torch.split(zoo.text(70), [9, 7, 16, 16, 16, 6], dim=1)
    expected = [modes.call(model, stock, part, logits_to_keep=1) for part in parts][-1]
    assert torch.equal(expected[0, 0], logits)


def test_a_prompt_that_is_held_whole_reads_its_last_token_again(lengths):
    model = zoo.build("muse_glimmer")
    ids = zoo.text(30)[0].tolist()
    cache = HybridCache(model)
    prefill(model, cache, ids, chunk=16)
    read = lengths(model)
    prefill(model, cache, ids, chunk=16)

    assert ([1], 30) == (read, cache.seen)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_read(lengths, tmp_path):
    model = zoo.build("muse_glimmer")
    ids = zoo.text(30)[0].tolist()
    cache = HybridCache(model, max_context=29)
    read = lengths(model)
    for ask in (
        lambda: prefill(model, cache, ids, chunk=8),
        lambda: HybridCache.for_prompt(model, ids, tmp_path, max_context=29),
    ):
        with pytest.raises(ContextFull, match="30 tokens from position 0 would pass max_context"):
            ask()

    assert ([], 0) == (read, cache.seen)


@pytest.mark.parametrize("length", [0, 8])
def test_a_prompt_shorter_than_what_is_held_is_refused(length):
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    prefill(model, cache, zoo.text(9)[0].tolist())
    with pytest.raises(ArgumentError, match="at least 9 tokens"):
        prefill(model, cache, zoo.text(length)[0].tolist() if length else [])

    assert 9 == cache.seen


def test_a_temperature_draws_and_a_seed_draws_the_same():
    logits = torch.tensor([1.0, 2.0, 3.0, 2.5])
    drawn = [
        [
            chosen(logits, temperature=5.0, generator=generator)
            for generator in [torch.Generator().manual_seed(seed)]
            for _ in range(40)
        ]
        for seed in (0, 0, 1)
    ]

    assert 2 == chosen(logits)
    assert drawn[0] == drawn[1] != drawn[2]
    assert {0, 1, 2, 3} == set(drawn[0])
