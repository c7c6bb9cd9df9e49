"""The exactness gates at the chapter's window of 2,048, on planes and attention alone."""

import functools

import pytest
import torch

import tiny
from kvplane import Layout
from kvplane.attention import reference

W = 2048
AT = (1, 31, 32, 33, 2047, 2048, 2049, 2559, 2560, 2561, 4095, 4096, 4097)
TURNED = (2049, 2559, 2560, 2561, 4095, 4097)
DIM = 16
BOUNDS = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 1e-5}


@functools.cache
def inputs(tokens, dtype="float16"):
    """Query, key and value `[T, heads, dim]` of tokens, those of fewer being their beginning."""
    generator = torch.Generator().manual_seed(5)
    every = torch.randn(5200, 8, DIM, generator=generator)[:tokens].to(getattr(torch, dtype))
    return every[:, :4], every[:, 4:6], every[:, 6:]


def store(**options):
    return tiny.store(W, heads=2, head_dim=DIM, max_context=8192, **options)


def written(session, tokens, *, chunk=256):
    """The session with the rows of tokens."""
    _, key, value = inputs(5200, session.geometry.dtype)
    while session.position < tokens:
        part = slice(session.position, min(tokens, session.position + chunk))
        with session.step(part.stop - part.start) as step:
            step.write(0, key[part], value[part])
    return session


def attended(session, count=3, *, wide=False):
    """Attention outputs of the next tokens, one by one; `wide` leaves the sums in float32."""
    query, key, value = inputs(5200, session.geometry.dtype)
    query = query.float() if wide else query
    outs = []
    for token in range(session.position, session.position + count):
        part = slice(token, token + 1)
        with session.step(1) as step:
            outs.append(step.attend(0, query[part], key[part], value[part]))
    return torch.cat(outs)


def at_row(snapshot, into, row):
    """The snapshot's session with its oldest row in another one."""
    (name, (capacity, length, origin, _)) = next(iter(snapshot.cursors.items()))
    builder = into.builder({name: (capacity, length, origin, row)})
    builder.write(0, origin, *snapshot.rows[0])
    return builder.finish()


def test_e1_every_schedule_gives_the_same_plane():
    planes = [
        written(store(dtype="float16").open(), 4097, chunk=chunk).planes[0]
        for chunk in (1, 17, 256, 2047, 2048, 2049, 4097)
    ]

    for plane in planes[1:]:
        assert torch.equal(planes[0].key, plane.key)
        assert torch.equal(planes[0].value, plane.value)


@pytest.mark.parametrize("tokens", AT)
def test_e2_blocked_attention_has_the_same_bits_at_any_rotation_and_layout(tokens):
    session = written(store(dtype="float16").open(), tokens)
    snapshot = session.snapshot()
    expected = attended(session)

    for row in (0, 1, 31, 511, 1024, 2047):
        for layout in Layout:
            other = store(dtype="float16", layout={"sliding_attention": layout})

            assert torch.equal(expected, attended(at_row(snapshot, other, row)))


@pytest.mark.parametrize("tokens", [31, 2049, 2560, 4097])
def test_e2_blocked_attention_has_the_same_bits_in_one_chunk_and_token_by_token(tokens):
    session = written(store(dtype="float16").open(), tokens)
    query, key, value = (rows[tokens : tokens + 70] for rows in inputs(5200))
    fork = session.fork()
    with fork.step(70) as step:
        chunk = step.attend(0, query, key, value)

    assert torch.equal(attended(session, 70), chunk)


@pytest.mark.parametrize("tokens", AT)
def test_e3_physical_attention_goes_on_at_the_kept_rotation(tokens):
    kept = store(dtype="float16", attention="physical")
    session = written(kept.open(), tokens)
    restored = kept.restore(session.snapshot())

    assert torch.equal(attended(session), attended(restored))


@pytest.mark.parametrize("tokens", TURNED)
def test_e3_physical_attention_differs_at_rotation_zero(tokens):
    kept = store(dtype="float16", attention="physical")
    session = written(kept.open(), tokens)

    assert 0 != tiny.meta(session, 0)[1]

    turned = at_row(session.snapshot(), kept, 0)

    # a turn by one row moves the last bits of sums that float16 would round alike
    assert not torch.equal(attended(session, 64, wide=True), attended(turned, 64, wide=True))


@pytest.mark.parametrize("order", ["blocked", "physical"])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("tokens", [33, 2048, 2561, 4097])
def test_attention_is_as_near_to_float64_as_the_table_says(tokens, dtype, order):
    session = written(store(dtype=dtype, attention=order).open(), tokens)
    query, key, value = (rows[tokens : tokens + 1] for rows in inputs(5200, dtype))
    with session.step(1) as step:
        out = step.attend(0, query, key, value).double()
    exact = reference.attend(
        session.planes[0],
        session.live_runs(session.groups[0]),
        query[None].double(),
        None,
        None,
        first_key=session.live(0).start,
        first_query=tokens,
        window=W,
        scale=DIM**-0.5,
    )[0]

    assert float((out - exact).norm() / exact.norm()) <= BOUNDS[dtype]
