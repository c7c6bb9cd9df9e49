import pytest
import torch
from gpu_cases import Shape, history, poisoned, same_bits

from kvplane.errors import ArgumentError, TensorMismatch
from kvplane.plane import Layout
from kvplane.ring import RingCursor

pytestmark = pytest.mark.gpu

# the chapter's conversions: largest half, its overflow, ties, subnormals, signed zero, NaN
NUMBERS = [65504.0, 65519.0, 65520.0, -65536.0, 1e-8, 5.96e-8, 6.1e-5, 2049.0, 2051.0, -0.0, 1e38]
NUMBERS += [float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize("layout", list(Layout))
def test_rows_come_back_as_they_were_stored(shape: Shape, layout: Layout):
    from kvplane.kernels.triton_rows import gather_rows, store_rows

    shape = shape.but(batch=2, value_dim=shape.head_dim * 3 // 2)
    _, key, value = history(shape, 37)
    plane = poisoned(shape, 50, layout)
    rows = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:37].to(shape.device)

    store_rows(plane, rows, key, value)
    got = gather_rows(plane, rows)

    assert same_bits(key, got[0])
    assert same_bits(value, got[1])
    others = torch.ones(50, dtype=torch.bool)
    others[rows.cpu()] = False
    assert bool(plane.key.cpu()[:, others].isnan().all())


@pytest.mark.parametrize("layout", list(Layout))
def test_runs_wrap_as_a_cursor_says(shape: Shape, layout: Layout):
    from kvplane.kernels.triton_rows import gather_rows, store_runs

    _, key, value = history(shape, 21)
    plane = poisoned(shape, 32, layout)
    cursor = RingCursor(32, origin_logical=5, origin_physical=20)
    cursor.append_batch(5, 21)
    runs = cursor.rows_of(5, 26)

    store_runs(plane, runs, key, value)
    rows = torch.cat([torch.arange(run.start, run.stop) for run in runs]).to(shape.device)
    got = gather_rows(plane, rows)

    assert same_bits(key, got[0])
    assert same_bits(value, got[1])


# NumPy says so when the interpreter rounds to infinity, which is what is meant
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_float32_is_rounded_to_the_bytes_of_the_cpu(shape: Shape):
    from kvplane.kernels.triton_rows import store_rows

    key = torch.tensor(NUMBERS * 12)[: 8 * shape.head_dim].repeat(2 * shape.head_dim)
    key = key[: 8 * shape.kv_heads * shape.head_dim].reshape(1, 8, shape.kv_heads, -1)
    shape = shape.but(value_dim=shape.head_dim, dtype=torch.float16)
    plane = poisoned(shape, 8, Layout.TOKEN_MAJOR)
    rows = torch.arange(8, device=shape.device)

    store_rows(plane, rows, key.to(shape.device), key.to(shape.device))

    bits = plane.key.contiguous().view(torch.int16).cpu()
    wanted = key.half().view(torch.int16)
    number = ~key.isnan()
    assert torch.equal(wanted[number], bits[number])
    assert bool(plane.key.cpu()[~number].isnan().all())


def test_copies_keep_every_bit_of_a_bfloat16(shape: Shape):
    from kvplane.kernels.triton_rows import gather_rows, store_rows

    shape = shape.but(dtype=torch.bfloat16)
    count = 65536 // (shape.kv_heads * shape.head_dim)
    every = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16)
    key = every.reshape(1, count, shape.kv_heads, shape.head_dim).to(shape.device)
    plane = poisoned(shape.but(value_dim=shape.head_dim), count, Layout.HEAD_MAJOR)
    rows = torch.arange(count, device=shape.device).flip(0)

    store_rows(plane, rows, key, key)
    got = gather_rows(plane, rows)

    assert same_bits(key, got[0])


def test_another_dtype_or_shape_is_refused_and_nothing_is_written(shape: Shape):
    from kvplane.kernels.triton_rows import gather_rows, store_rows, store_runs

    _, key, value = history(shape, 4)
    plane = poisoned(shape, 8, Layout.TOKEN_MAJOR)
    rows = torch.arange(4, device=shape.device)

    with pytest.raises(TensorMismatch, match="key"):
        store_rows(plane, rows, key.double(), value)
    with pytest.raises(TensorMismatch, match="value"):
        store_rows(plane, rows, key, value[..., :-1])
    with pytest.raises(TensorMismatch, match="key shape"):
        store_rows(plane, rows[:3], key, value)
    with pytest.raises(TensorMismatch, match="rows"):
        store_rows(plane, rows.int(), key, value)
    with pytest.raises(TensorMismatch, match="rows"):
        gather_rows(plane, rows.int())
    with pytest.raises(ArgumentError, match="runs"):
        store_runs(plane, [range(3), range(5, 6)], key, value)
    with pytest.raises(TensorMismatch, match="key shape"):
        store_runs(plane, [range(3)], key, value)

    assert bool(plane.key.isnan().all())
