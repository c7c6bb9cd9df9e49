"""What a hybrid model says next does not depend on what happened to its session (E3 to E6, E8)."""

import pytest
import torch

from gates import (
    AT,
    LAYOUTS,
    MODELS,
    NEXT,
    WRAPPED,
    W,
    goes_on,
    model,
    same_bits,
    undisturbed,
)
from hybrid_model import text

# each model in one kind of memory; the third only where a ring has wrapped
MEMORY = dict(zip(MODELS, ("heap", "mapped", "mapped"), strict=True))
CASES = [
    pytest.param(name, tokens, id=f"{name}, {tokens} tokens")
    for name in MODELS
    for tokens in (WRAPPED if name.endswith(" f16") else AT)
]


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture(params=["heap", "mapped"])
def memory(request):
    return request.param


@pytest.mark.parametrize("tokens", AT)
def test_e3_physical_attention_goes_on_at_the_kept_rotation(tokens):
    name = "8 layers, window 64, f32"
    network = model(name)
    store = network.store(attention="physical")
    session = store.open()
    network.prefill(session, text(tokens))
    ids = text(tokens + NEXT)[tokens:]
    restored = store.restore(session.snapshot())

    assert same_bits(undisturbed(name, tokens, "physical"), network.decode(restored, ids))


@pytest.mark.parametrize("tokens", WRAPPED)
def test_e3_physical_attention_differs_at_another_rotation(tokens):
    name = "8 layers, window 64, f32"
    network = model(name)
    store = network.store(attention="physical")
    session = store.open()
    network.prefill(session, text(tokens))
    ids = text(tokens + NEXT)[tokens:]
    turned = at_rotation_zero(store, session)

    assert not same_bits(undisturbed(name, tokens, "physical"), network.decode(turned, ids))


def at_rotation_zero(store, session):
    """A session with the same rows, each ring's oldest in row 0."""
    snapshot = session.snapshot()
    cursors = {
        group: (capacity, length, origin, 0 if group.startswith("s") else row)
        for group, (capacity, length, origin, row) in snapshot.cursors.items()
    }
    builder = store.builder(cursors)
    for layer, (key, value) in snapshot.rows.items():
        builder.write(layer, session.live(layer).start, key, value)
    return builder.finish()


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_e3_blocked_attention_does_not_care_about_the_rotation(name, tokens):
    store = model(name).store()
    session = store.open()
    model(name).prefill(session, text(tokens))

    assert goes_on(name, at_rotation_zero(store, session), tokens, count=20)


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_e4_after_restore_and_fork_the_next_tokens_are_the_same(name, tokens):
    network = model(name)
    store = network.store(memory=MEMORY[name])
    session = store.open([])
    network.prefill(session, text(tokens))
    snapshot = session.snapshot()
    fork = session.fork()

    assert goes_on(name, fork, tokens)
    assert goes_on(name, session, tokens, count=20)

    session.close()
    fork.close()

    assert goes_on(name, network.store(memory=MEMORY[name]).restore(snapshot), tokens)


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_e4_after_rewind_and_replay_the_next_tokens_are_the_same(name, tokens):
    network = model(name)
    session = network.store(slack=12, memory=MEMORY[name]).open([])
    ids = text(tokens + NEXT)
    network.prefill(session, ids[:tokens])
    network.decode(session, [1, 2, 3, 4])
    session.rewind(tokens)
    network.decode(session, ids[tokens : tokens + 8])
    session.rewind(tokens)

    assert goes_on(name, session, tokens)


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_e4_after_a_return_to_a_checkpoint_the_next_tokens_are_the_same(name, tokens):
    network = model(name)
    session = network.store(memory=MEMORY[name]).open([])
    network.prefill(session, text(tokens))
    kept = session.checkpoint()
    network.prefill(session, text(W + 9, seed=1))
    session.return_to(kept)

    assert goes_on(name, session, tokens)


@pytest.mark.parametrize(("name", "tokens"), CASES)
@pytest.mark.parametrize("taken", [5, W + 1])
def test_e5_after_a_rollback_the_next_tokens_are_the_same(name, tokens, taken):
    network = model(name)
    session = network.store().open([])
    network.prefill(session, text(tokens))
    with session.step(text(taken, seed=2)) as step:
        network(step, text(taken, seed=2))
        step.abort()

    assert goes_on(name, session, tokens, count=20)


@pytest.mark.parametrize("length", [257, 300, 511, 512, 600])
def test_e6_rows_of_whole_blocks_do_not_depend_on_what_follows(name, length):
    network = model(name)
    ids = text(768)
    short, long = network.store().open(ids[:0]), network.store().open(ids[:0])
    for session, tokens in ((short, ids[:length]), (long, ids)):
        first = 0
        while first < len(tokens):
            stop = min(first + 256, len(tokens))
            network.call(session, tokens[first:stop], capture=(stop,) if stop % 256 == 0 else ())
            first = stop
    cuts = [cut for cut in (256, 512) if cut <= length]

    assert cuts == sorted(short.captures)
    assert cuts[-1] == short.ledger.canonical
    for group in short.groups:
        for layer in group.layers:
            if group.sliding_window is None:
                for mine, theirs in zip(
                    short.spans(layer, 0, cuts[-1])[0],
                    long.spans(layer, 0, cuts[-1])[0],
                    strict=True,
                ):
                    assert same_bits(mine, theirs)
            else:
                for cut in cuts:
                    mine, theirs = short.captures[cut].rows[layer], long.captures[cut].rows[layer]

                    assert group.sliding_window - 1 == mine[0].shape[1]
                    assert same_bits(mine[0], theirs[0])
                    assert same_bits(mine[1], theirs[1])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tokens", [33, 2 * W + 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["NHD-NHD", "NHD-HND", "HND-NHD", "HND-HND"])
def test_e8_memory_that_nothing_wrote_reaches_no_output(tokens, layout, memory):
    name = "8 layers, window 64, f32"
    network = model(name)
    store = network.store(memory=memory, layout=layout, slack=3)
    session = store.open([])
    untouched = session.planes[3].key[0, -1]

    assert torch.isnan(untouched).all()

    network.prefill(session, text(tokens))
    restored = store.restore(session.snapshot())
    fork = session.fork()
    kept = session.checkpoint()

    assert goes_on(name, fork, tokens, count=20)
    assert goes_on(name, restored, tokens, count=20)
    with session.step(text(W + 9, seed=2), speculative=True) as step:
        network(step, text(W + 9, seed=2))
        step.commit(7)
    session.return_to(kept)
    assert goes_on(name, session, tokens, count=20)

    session.reset()
    network.prefill(session, text(tokens))

    assert goes_on(name, session, tokens, count=20)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tokens", [1, 33, W, 2 * W + 1])
def test_e8_nor_in_physical_order(tokens, memory):
    name = "8 layers, window 64, f32"
    session = model(name).store(attention="physical", memory=memory).open()
    model(name).prefill(session, text(tokens))
    got = model(name).decode(session, text(tokens + NEXT)[tokens:])

    assert same_bits(undisturbed(name, tokens, "physical"), got)
