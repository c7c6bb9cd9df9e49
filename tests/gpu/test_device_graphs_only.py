"""Graphs that are captured: what the interpreter cannot show."""

import copy
import inspect

import pytest
import torch
from gpu_cases import same_bits
from gpu_models import called, gemma, held, ids, muse

from kvplane.errors import ArgumentError
from kvplane.integrations.transformers import HybridCache

pytestmark = pytest.mark.gpu


def filled(model, **options):
    cache = HybridCache(model, attention="kvplane", max_context=256, **options)
    called(model, cache, [ids(17)])
    return cache


@pytest.mark.parametrize("make", [muse, gemma])
def test_compiled_layers_have_the_same_bits_with_and_without_a_graph(make):
    from kvplane.integrations.graphs import DecodeGraph

    model = make(torch.bfloat16)
    cache = filled(model)
    twin = cache.fork()
    graph = DecodeGraph(model, cache, layers="compiled")
    for token in ids(30, seed=3):
        got = graph.step([token]).clone()
        wanted = graph.launched([token], twin)

        assert same_bits(wanted, got)
    assert all(same_bits(a, b) for a, b in zip(held(cache), held(twin), strict=True))


@pytest.mark.parametrize("layers", ["captured", "compiled"])
def test_generate_replays_graphs_when_asked(layers):
    model = muse(torch.bfloat16)
    prompt = torch.tensor([ids(17)], device="cuda")
    name = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
    plain = HybridCache(model, attention="kvplane", max_context=256)
    wanted = model.generate(prompt, max_new_tokens=40, do_sample=False, **{name: plain})
    cache = HybridCache(model, graphs=layers, max_context=256)
    got = model.generate(prompt, max_new_tokens=40, do_sample=False, **{name: cache})
    graphs = model.__dict__["forward"]._graphs

    assert len(graphs) == 1
    assert cache.seen == plain.seen == 17 + 39
    if layers == "captured":
        assert wanted.tolist() == got.tolist()
        assert all(same_bits(a, b) for a, b in zip(held(plain), held(cache), strict=True))
    # a fork of the cache is served by the same graph
    twin = cache.fork()
    called(model, twin, [[5]])
    assert len(graphs) == 1
    assert twin.seen == cache.seen + 1
    assert copy.deepcopy(model.__dict__["forward"])._graphs == {}


def test_a_batch_of_equal_prompts_is_replayed_too():
    model = gemma(torch.bfloat16)
    prompt = torch.tensor([ids(17), ids(17, seed=1)], device="cuda")
    cache = HybridCache(model, graphs=True, max_context=256)
    plain = HybridCache(model, attention="kvplane", max_context=256)
    name = "cache" if "cache" in type(model).forward.__code__.co_varnames else "past_key_values"
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}

    assert (
        model.generate(prompt, **options, **{name: plain}).tolist()
        == model.generate(prompt, **options, **{name: cache}).tolist()
    )
    assert len(model.__dict__["forward"]._graphs) == 1


def test_a_model_whose_output_follows_the_hosts_count_is_refused():
    from kvplane.integrations.graphs import DecodeGraph

    model = muse()
    forward = type(model).forward.__get__(model)

    def counting(*args, **kwargs):
        out = forward(*args, **kwargs)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        out.logits = out.logits * (1 + cache.get_seq_length() % 7)
        return out

    counting.__signature__ = inspect.signature(forward)
    cache = filled(model)
    model.__dict__["forward"] = counting

    with pytest.raises(ArgumentError, match="position ids alone"):
        DecodeGraph(model, cache).step([4])

    assert cache.seen == 17


def test_a_conversation_on_a_gpu_replays_graphs_and_says_the_same():
    from kvplane.integrations.transformers.conversation import converse
    from kvplane.integrations.transformers.loading import load_model

    said = []
    for attention in (None, "kvplane"):
        named = load_model("glimmer-nano", device="cuda")
        talk = converse(named, attention=attention)
        talk.read([*named.words.begin, *named.words.encode("The store keeps " * 20)])
        said.append(list(talk.say(40)))
        forward = named.model.__dict__.get("forward")
        assert (attention is None) == (forward is not None and len(forward._graphs) == 1)

    assert said[0] == said[1]
    assert len(said[0]) == 40
