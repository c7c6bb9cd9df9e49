import pytest
import torch
from gpu_cases import error_of, same_bits
from gpu_models import DEVICE, STEPS, WINDOW, agree, called, gemma, held, ids, muse

from kvplane.errors import ArgumentError, CacheDiscontinuity, ContextFull, SessionClosed

pytestmark = pytest.mark.gpu
PROMPT = ids(WINDOW - 3)


def filled(model, tokens=PROMPT, **options):
    """A cache that has read a prompt, or one a sequence."""
    from kvplane.integrations.transformers import HybridCache

    cache = HybridCache(model, attention="kvplane", max_context=64, **options)
    rows = tokens if isinstance(tokens[0], list) else [tokens]
    called(model, cache, rows)
    return cache


@pytest.mark.parametrize("make", [muse, gemma])
def test_a_replayed_step_has_the_bits_of_a_call_past_every_wrap(make):
    from kvplane.integrations.graphs import DecodeGraph

    model = make()
    cache = filled(model)
    twin = cache.fork()
    graph = DecodeGraph(model, cache)
    for token in ids(STEPS, seed=3):
        wanted = called(model, twin, [[token]])
        got = graph.step([token])

        assert agree(wanted, got)
    assert cache.seen == twin.seen == len(PROMPT) + STEPS
    assert cache.tokens == twin.tokens
    assert all(agree(mine, theirs) for mine, theirs in zip(held(cache), held(twin), strict=True))


def test_a_graph_goes_on_after_rewinds_prompts_forks_and_restored_sessions():
    from kvplane.integrations.graphs import DecodeGraph

    model = muse()
    cache = filled(model, slack=4)
    twin = cache.fork()
    graph = DecodeGraph(model, cache)

    def same(token: int, mine, theirs) -> None:
        assert agree(called(model, theirs, [[token]]), graph.step([token], mine))

    for token in ids(4, seed=4):
        same(token, cache, twin)
    for each in (cache, twin):
        each.rewind(each.seen - 3)
    same(7, cache, twin)
    for each in (cache, twin):
        called(model, each, [ids(5, seed=5)])
    same(8, cache, twin)
    # two forks in turn, and one that was moved
    forks = [(cache.fork(), twin.fork()) for _ in range(2)]
    for number, token in enumerate(ids(4, seed=6)):
        same(token, *forks[number % 2])
    same(9, cache, twin)
    pair = []
    for each in (cache, twin):
        from kvplane.integrations.transformers import HybridCache

        moved = HybridCache(model, attention="kvplane", max_context=64, slack=4)
        moved.adopt(each.session.store.restore(each.session.snapshot()))
        pair.append(moved)
    for token in ids(2, seed=7):
        same(token, *pair)

    assert cache.seen == twin.seen


def test_a_refused_step_has_run_nothing_and_changed_nothing():
    from kvplane.integrations.graphs import DecodeGraph

    model = muse()
    cache = filled(model, ids(62))
    graph = DecodeGraph(model, cache)
    graph.step([5])
    graph.step([6])
    before = held(cache)

    with pytest.raises(ContextFull):
        graph.step([7])

    assert cache.seen == 64
    assert all(same_bits(a, b) for a, b in zip(before, held(cache), strict=True))
    cache.rewind(63)
    twin = cache.fork()
    assert agree(called(model, twin, [[9]]), graph.step([9]))
    cache.session.close()
    with pytest.raises((SessionClosed, ArgumentError)):
        graph.step([7])


def test_tables_are_written_only_when_they_say_something_else(monkeypatch):
    from kvplane.integrations.graphs import DecodeGraph

    model = muse()
    cache = filled(model)
    graph = DecodeGraph(model, cache)
    written = []
    write = graph._tables.write
    monkeypatch.setattr(graph._tables, "write", lambda each: (written.append(1), write(each)))
    graph.step([5])
    count = len(written)
    for token in (6, 7):
        graph.step([token])
    assert len(written) == count
    cache.crop(-1)
    graph.step([8])

    assert len(written) == count + 1


def test_a_step_that_is_taken_back_leaves_the_position_and_what_it_needs():
    from kvplane.integrations.graphs import DecodeGraph

    model = muse()
    cache = filled(model, ids(50))
    twin = cache.fork()
    graph = DecodeGraph(model, cache)
    graph.step([5])
    cache.crop(-1)

    assert cache.seen == 50
    assert agree(called(model, twin, [[6]]), graph.step([6]))


def test_caches_of_other_lengths_go_forward_in_one_step():
    from kvplane.integrations.graphs import DecodeGraph

    model = muse()
    lengths = (3, WINDOW + 9, 41)
    alone = [filled(model, ids(length, seed=length)) for length in lengths]
    together = [cache.fork() for cache in alone]
    graph = DecodeGraph(model, together)
    for number in range(2):
        tokens = ids(3, seed=number)
        wanted = [
            called(model, cache, [[token]]) for cache, token in zip(alone, tokens, strict=True)
        ]
        got = graph.step(tokens)

        # products of another shape round otherwise
        assert error_of(got, torch.cat(wanted)) < 1e-4
    assert [cache.seen for cache in together] == [length + 2 for length in lengths]
    together[2].session.close()
    with pytest.raises((SessionClosed, ArgumentError)):
        graph.step([1, 2, 3])
    assert [cache.seen for cache in together[:2]] == [length + 2 for length in lengths[:2]]


def test_a_batch_in_lockstep_is_one_cache():
    from kvplane.integrations.graphs import DecodeGraph

    model = gemma()
    cache = filled(model, [ids(22, seed=number) for number in range(3)])
    twin = cache.fork()
    graph = DecodeGraph(model, cache)
    for number in range(1 if DEVICE == "cpu" else 4):
        tokens = ids(3, seed=number)
        wanted = called(model, twin, [[token] for token in tokens])

        assert agree(wanted, graph.step(tokens))
    with pytest.raises(ArgumentError, match="ids"):
        graph.step([1, 2])
    with pytest.raises(ArgumentError, match="shape"):
        graph.step([1], filled(model))


def test_what_no_graph_can_serve_is_refused():
    from kvplane.integrations.graphs import DecodeGraph
    from kvplane.integrations.transformers import HybridCache

    model = muse()
    with pytest.raises(ArgumentError, match="a prompt"):
        DecodeGraph(model, HybridCache(model, attention="kvplane"))
    cache = filled(model)
    with pytest.raises(ArgumentError, match="layers"):
        DecodeGraph(model, cache, layers="fast")
    with pytest.raises(ArgumentError, match="distinct"):
        DecodeGraph(model, [cache, cache])
    recording = cache.fork()
    recording.record(on=True)
    with pytest.raises(ArgumentError, match="not recording"):
        DecodeGraph(model, recording).step([3])
    wished = cache.fork()
    wished.wish([wished.seen + 1])
    graph = DecodeGraph(model, wished)
    with pytest.raises(ArgumentError, match="no cut next"):
        graph.step([3])
    called(model, wished, [[3]])
    assert list(wished.session.captures) == [len(PROMPT) + 1]
    graph.step([4])
    model.set_attn_implementation("eager")
    view = HybridCache(model)
    called(model, view, [PROMPT])
    with pytest.raises(ArgumentError, match="kvplane"):
        DecodeGraph(model, view)


def test_positions_that_do_not_follow_are_refused_before_anything_runs():
    from kvplane.integrations.graphs import DecodeGraph

    model = muse()
    cache = filled(model)
    graph = DecodeGraph(model, cache)
    cache._chart.last = [(3,)]

    with pytest.raises(CacheDiscontinuity):
        graph.step([4])

    assert cache.seen == len(PROMPT)
    assert DEVICE in str(cache.session.plan.device)
