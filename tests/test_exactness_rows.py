"""Rows and attention have the same bits whatever the history (E1, E2, E5)."""

import functools

import pytest
import torch

from gates import AT, LAYOUTS, W, model, same_bits, same_planes
from hybrid_model import HEAD_DIM, HEADS, KV_HEADS

pytestmark = pytest.mark.usefixtures("memory")


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
