"""The exactness gates of a hybrid model: the same bits, whatever the history (E1 to E6 and E8)."""

import functools

import pytest
import torch

from hybrid_model import HEAD_DIM, HEADS, KV_HEADS, HybridModel, text
from kvplane import Layout

W = 64
AT = (1, 31, 32, 33, W - 1, W, W + 1, 2 * W - 1, 2 * W, 2 * W + 1)
WRAPPED = (W + 1, 2 * W - 1, 2 * W + 1)
NEXT = 64
MODELS = {
    "8 layers, window 64, f32": (8, (W,), "float32"),
    "13 layers, windows 32 and 64, bf16": (13, (32, W), "bfloat16"),
    "8 layers, windows 64 and 32, f16": (8, (W, 32), "float16"),
}
LAYOUTS = [
    {"sliding_attention": ring, "full_attention": full} for ring in Layout for full in Layout
]


@functools.cache
def model(name):
    layers, windows, dtype = MODELS[name]
    return HybridModel(layers, *windows, dtype=dtype)


@functools.cache
def undisturbed(name, tokens, order="blocked"):
    """Logits of the 64 tokens after `tokens`, of a session to which nothing ever happened."""
    network = model(name)
    session = network.store(attention=order).open([])
    network.prefill(session, text(tokens))
    return network.decode(session, text(tokens + NEXT)[tokens:])


def same_bits(expected, got):
    """Whether two tensors are equal to the last bit, NaN and the sign of zero included."""
    as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (expected, got)]
    return expected.dtype == got.dtype and torch.equal(*as_bytes)


def goes_on(name, session, tokens):
    """Whether the next 64 tokens' logits are those of the undisturbed session."""
    ids = text(tokens + NEXT)[tokens:]
    got = model(name).decode(session, ids)
    assert torch.isfinite(got).all()
    return same_bits(undisturbed(name, tokens), got)


def planes(session):
    """Every byte of every row that is live, and where it lies."""
    return {
        (layer, row): (session.planes[layer].key[0, row], session.planes[layer].value[0, row])
        for group in session.groups
        for layer in group.layers
        for run in session.live_runs(group)
        for row in run
    }


def same_planes(expected, got):
    mine, theirs = planes(expected), planes(got)
    return mine.keys() == theirs.keys() and all(
        same_bits(a, b) for at in mine for a, b in zip(mine[at], theirs[at], strict=True)
    )


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


def schedules(tokens):
    """Ways to cut a number of tokens into steps."""
    yield [tokens]
    yield [1] * tokens
    yield [tokens - 1, 1]
    for chunk in (4, 7, 31, 32, 33, W, W + 1):
        yield [chunk] * (tokens // chunk) + [tokens % chunk]


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_e1_rows_lie_in_the_same_bytes_whatever_the_chunks(tokens, memory):
    network = model("8 layers, windows 64 and 32, f16")
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=generator).half()
    sessions = []
    for schedule in schedules(tokens):
        session = network.store(memory=memory).open()
        for count in filter(None, schedule):
            first = session.position
            with session.step(count) as step:
                for layer in range(8):
                    step.write(layer, *rows[:, first : first + count])
        sessions.append(session)

    for session in sessions[1:]:
        assert sessions[0].cursors == session.cursors
        assert same_planes(sessions[0], session)


@functools.cache
def qkv(tokens, heads=HEADS, dim=HEAD_DIM, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(4800, heads, dim, generator=generator)[:tokens].to(dtype)
    key, value = torch.randn(2, 4800, KV_HEADS, dim, generator=generator)[:, :tokens].to(dtype)
    return query, key, value


def attended(session, tokens, *, chunk=1):
    """Attention outputs of every layer for the tokens up to `tokens`, from the session's own."""
    query, key, value = qkv(tokens)
    outs = []
    while session.position < tokens:
        part = slice(session.position, min(tokens, session.position + chunk))
        with session.step(part.stop - part.start) as step:
            outs.append(
                torch.stack(
                    [
                        step.attend(layer, query[part], key[part], value[part])
                        for layer in range(len(session.geometry.layers))
                    ],
                    dim=1,
                )
            )
    return torch.cat(outs)


NAME = "13 layers, windows 32 and 64, bf16"


@functools.cache
def plain_outputs():
    return attended(model(NAME).store().open(), 2 * W + 9)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["NHD-NHD", "NHD-HND", "HND-NHD", "HND-HND"])
@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_e2_blocked_attention_has_the_same_bits_in_every_layout_and_chunking(layout, chunk, memory):
    session = model(NAME).store(layout=layout, memory=memory).open()

    assert same_bits(plain_outputs(), attended(session, 2 * W + 9, chunk=chunk))


@pytest.mark.parametrize("first_row", range(32))
def test_e2_blocked_attention_has_the_same_bits_at_every_rotation(first_row):
    session = model(NAME).store().open(first_row=first_row)

    assert same_bits(plain_outputs(), attended(session, 2 * W + 9, chunk=29))


@pytest.mark.parametrize("own", [0, 1, 2])
def test_e2_a_session_has_the_same_bits_alone_and_in_any_batch(own):
    store = model(NAME).store()
    query, key, value = qkv(2 * W + 9)
    generator = torch.Generator().manual_seed(own)
    neighbours = []
    for length in (0, 7, W, 150)[: own + 2]:
        session = store.open()
        if length:
            with session.step(length) as step:
                for layer in range(13):
                    rows = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator)
                    step.write(layer, *rows)
        neighbours.append(session)
    session = store.open()
    together = [*neighbours[:own], session, *neighbours[own:]]
    outs = []
    while session.position < 2 * W + 9:
        count = min(2 * W + 9 - session.position, 1 + session.position % 17)
        counts = [int(torch.randint(1, 12, (), generator=generator)) for _ in together]
        counts[own] = count
        part = slice(session.position, session.position + count)
        before = sum(counts[:own])
        with store.batch(together, counts) as step:
            layers = []
            for layer in range(13):
                rows = torch.randn(3, sum(counts), HEADS, HEAD_DIM, generator=generator).bfloat16()
                rows[0, before : before + count] = query[part]
                rows[1, before : before + count, :KV_HEADS] = key[part]
                rows[2, before : before + count, :KV_HEADS] = value[part]
                out = step.attend(layer, rows[0], rows[1, :, :KV_HEADS], rows[2, :, :KV_HEADS])
                layers.append(out[before : before + count])
        outs.append(torch.stack(layers, dim=1))

    assert same_bits(plain_outputs(), torch.cat(outs))


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

    assert goes_on(name, at_rotation_zero(store, session), tokens)


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_e4_after_restore_and_fork_the_next_tokens_are_the_same(name, tokens):
    network = model(name)
    store = network.store(memory=MEMORY[name])
    session = store.open([])
    network.prefill(session, text(tokens))
    snapshot = session.snapshot()
    fork = session.fork()

    assert goes_on(name, fork, tokens)
    assert goes_on(name, session, tokens)

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
    network.prefill(session, text(3 * W, seed=1))
    session.return_to(kept)

    assert goes_on(name, session, tokens)


@functools.cache
def random_rows(tokens):
    generator = torch.Generator().manual_seed(11)
    return torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()


def put(session, count, *, accepted=None):
    """Take the next tokens' rows in every layer; keep some."""
    first = session.position
    rows = random_rows(8 * W)[:, first : first + count]
    with session.step(count, speculative=accepted is not None) as step:
        for layer in range(13):
            step.write(layer, *rows)
        step.commit(accepted)


@pytest.mark.parametrize("tokens", AT)
@pytest.mark.parametrize("taken", [1, 5, 20, 33, W + 1, 2 * W + 3])
def test_e5_after_a_rollback_the_needed_rows_lie_as_if_never_taken(tokens, taken, memory):
    store = model("13 layers, windows 32 and 64, bf16").store(memory=memory)
    for accepted in sorted({0, 1, taken // 2, taken - 1, taken}):
        session, only = store.open(), store.open()
        put(session, tokens)
        put(session, taken, accepted=accepted)
        put(only, tokens)
        if accepted:
            put(only, accepted)

        assert only.position == session.position
        for group in session.groups:
            window = group.sliding_window or store.max_context
            first = max(0, session.position - (window - 1))
            expected = only.cursors[group.id].rows_of(first, session.position)
            got = session.cursors[group.id].rows_of(first, session.position)

            assert expected == got
            for layer in group.layers:
                mine, theirs = only.planes[layer], session.planes[layer]
                assert same_bits(mine.copy_of(expected)[0], theirs.copy_of(got)[0])
                assert same_bits(mine.copy_of(expected)[1], theirs.copy_of(got)[1])


@pytest.mark.parametrize(("name", "tokens"), CASES)
@pytest.mark.parametrize("taken", [5, W + 1])
def test_e5_after_a_rollback_the_next_tokens_are_the_same(name, tokens, taken):
    network = model(name)
    session = network.store().open([])
    network.prefill(session, text(tokens))
    with session.step(text(taken, seed=2)) as step:
        network(step, text(taken, seed=2))
        step.abort()

    assert goes_on(name, session, tokens)


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

    assert goes_on(name, fork, tokens)
    assert goes_on(name, restored, tokens)
    with session.step(text(W + 9, seed=2), speculative=True) as step:
        network(step, text(W + 9, seed=2))
        step.commit(7)
    session.return_to(kept)
    assert goes_on(name, session, tokens)

    session.reset()
    network.prefill(session, text(tokens))

    assert goes_on(name, session, tokens)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tokens", [1, 33, W, 2 * W + 1])
def test_e8_nor_in_physical_order(tokens, memory):
    name = "8 layers, window 64, f32"
    session = model(name).store(attention="physical", memory=memory).open()
    model(name).prefill(session, text(tokens))
    got = model(name).decode(session, text(tokens + NEXT)[tokens:])

    assert same_bits(undisturbed(name, tokens, "physical"), got)
