"""A token copied by its address: the bytes of a strided copy, and left to one where it must be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from kvplane.kernels.addressed import MAX_PIECES, addresses_of, put_row
from row_planes import LAYOUTS, bits, make_plane

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    capacity=st.integers(1, 7),
    heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch=st.integers(1, 3),
    data=st.data(),
)
def test_the_bytes_are_those_of_a_strided_copy_and_no_others(
    layout, dtype, capacity, heads, dims, batch, data
):
    planes = [
        make_plane(layout, capacity, heads=heads, dims=dims, dtype=dtype, batch=batch, fill=7.0)
        for _ in range(2)
    ]
    row = data.draw(st.integers(0, capacity - 1))
    seed = data.draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    for mine, theirs in ((p.key, q.key) for p, q in [planes]):
        width = dtype.itemsize * mine.shape[3]
        raw = torch.randint(0, 256, (batch, 1, heads, width), generator=generator)
        source = raw.to(torch.uint8).view(dtype)
        target = addresses_of(mine)
        in_one_piece = layout == "token_major" or heads == 1
        pieces = batch * (1 if in_one_piece else heads)

        assert (pieces <= MAX_PIECES) == (target is not None)
        if target is not None:
            assert put_row(target, row, source)
            theirs[:, row : row + 1] = source
    expected, got = planes[1].flat, planes[0].flat

    assert torch.equal(bits(expected), bits(got))


def test_what_has_no_plain_memory_of_the_plane_is_not_copied_by_address():
    plane = make_plane("token_major", 4, heads=2, dims=(4, 4), dtype=torch.float32)
    target = addresses_of(plane.key)
    token = torch.ones(1, 2, 4)
    refused = {
        "another dtype": token.half(),
        "fewer elements": token[:, :1],
        "a sparse tensor": token.to_sparse(),
        "another device": token.to("meta"),
        "heads in another order": torch.ones(1, 4, 2).mT,
        "a sign beside its bytes": torch.complex(token, token).conj().imag,
        "a subclass": torch.nn.Parameter(token),
        "zeros that were never made": torch._efficientzerotensor((1, 2, 4)),
    }

    assert dict.fromkeys(refused, False) == {
        what: put_row(target, 1, source) for what, source in refused.items()
    }
    assert [False, False] == [put_row(target, row, token) for row in (-1, 4)]
    assert not plane.flat.any()
    assert put_row(target, 1, token)
    assert 8 == plane.flat.sum()


def test_what_has_no_plain_memory_of_its_own_has_no_addresses():
    plane = make_plane("token_major", 4, dtype=torch.float32)

    assert addresses_of(plane.key.to("meta")) is None
    assert addresses_of(plane.key[..., ::2]) is None
    assert addresses_of(torch._efficientzerotensor((1, 4, 2, 4))) is None


def sources(token):
    """The same numbers in memory of several kinds."""
    return {
        "plain": token,
        "in another order": token.mT.contiguous().mT,
        "a sign beside its bytes": torch.complex(token, -token).conj().imag,
        "a subclass": torch.nn.Parameter(token, requires_grad=False),
        "with gradients": token.clone().requires_grad_(),
        "a part of more": torch.stack([token, token], dim=-1)[..., 0],
    }


@pytest.mark.parametrize("kind", sources(torch.ones(1, 2, 4)))
def test_a_step_stores_the_numbers_of_a_token_whatever_memory_they_come_in(kind):
    session = tiny.store(4, None, heads=2, head_dim=4).open()
    for position in range(6):
        with session.step(1) as step:
            for layer in (0, 1):
                group = session.geometry.group_of(layer)
                key, value = tiny.rows(group, layer, [position])
                step.write(layer, sources(key)[kind], sources(value)[kind])

    assert [2, 3, 4, 5] == tiny.held(session, 0)
    assert list(range(6)) == tiny.held(session, 1)


def test_a_token_that_is_stored_by_address_can_be_taken_back():
    session = tiny.filled(tiny.store(4, None).open(), 6)
    step = session.step(1)
    step.__enter__()
    tiny.write(step, session, [6], layers=[0])
    step.abort()

    # the row that it overwrote is outside the window of what comes next
    assert [3, 4, 5] == tiny.held(session, 0)
    assert 6 == session.position
