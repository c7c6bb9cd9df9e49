import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import ArgumentError, Overflow, TensorMismatch
from kvplane.kernels import reference, vectorized
from kvplane.kernels.rounding import converted, rounded
from row_planes import LAYOUTS, bits, make_plane, same_bits

KERNELS = pytest.mark.parametrize(
    "kernel", [reference, vectorized], ids=["reference", "vectorized"]
)
IN_BOTH_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NARROW = pytest.mark.parametrize("dtype", DTYPES[:2], ids=["f16", "bf16"])


def from_bits(*patterns):
    """Float32 numbers of the given bit patterns."""
    return torch.tensor(patterns, dtype=torch.uint32).view(torch.float32)


# ties both ways, subnormals of either format, the middle above the largest number, NaN, signs
HARD_NUMBERS = (
    *(0.0, -0.0, 1.0, 65504.0, 65519.99, 65520.0, -65520.0, 1e6, 436.0, 188.0),
    *(2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 3 * 2.0**-25, 2.0**-14, 2.0**-126, 2.0**-133, 2.0**-149),
    *(1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8),
    *(3.3895313892515355e38, 3.4028234663852886e38, -3.4028234663852886e38, math.inf, -math.inf),
)
HARD_BITS = (0x7FC00000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x7F7F8000, 0x7F7F7FFF)
HARD_FLOAT32 = torch.cat([torch.tensor(HARD_NUMBERS), from_bits(*HARD_BITS)])


@st.composite
def stores(draw):
    """A plane's shape, and distinct rows in any order."""
    capacity = draw(st.integers(1, 9))
    rows = draw(st.lists(st.integers(0, capacity - 1), max_size=capacity, unique=True))
    if draw(st.booleans()):
        rows.sort()
    return {
        "rows": rows,
        "capacity": capacity,
        "layout": draw(st.sampled_from(LAYOUTS)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "heads": draw(st.integers(1, 3)),
        "dims": (draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        "batch": draw(st.integers(1, 2)),
        "source": draw(st.sampled_from(["plane's dtype", "float32"])),
        "seed": draw(st.integers(0, 2**16)),
    }


def drawn(case):
    """Any bit patterns at all as key and value of the rows."""
    generator = torch.Generator().manual_seed(case["seed"])
    dtype = case["dtype"] if case["source"] == "plane's dtype" else torch.float32
    tensors = []
    for dim in case["dims"]:
        shape = (case["batch"], len(case["rows"]), case["heads"], dim, dtype.itemsize)
        raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        tensors.append(raw.view(dtype)[..., 0])
    return tensors


def plane_of(case, fill):
    names = ("layout", "capacity", "heads", "dims", "dtype", "batch")
    chosen = {name: case[name] for name in names}
    return make_plane(chosen.pop("layout"), chosen.pop("capacity"), **chosen, fill=fill)


@given(stores())
def test_both_kernels_write_the_same_bytes_and_touch_no_other_row(case):
    key, value = drawn(case)
    rows = torch.tensor(case["rows"], dtype=torch.int64)
    planes = [plane_of(case, fill=7.0) for _ in range(2)]
    for kernel, plane in zip((reference, vectorized), planes, strict=True):
        kernel.store_rows(plane, rows, key, value)
    others = [row for row in range(case["capacity"]) if row not in case["rows"]]

    assert same_bits(planes[0].flat, planes[1].flat)
    assert torch.all(planes[1].key[:, others] == 7.0)
    assert torch.all(planes[1].value[:, others] == 7.0)


@given(stores())
def test_what_is_gathered_is_what_was_stored_bit_for_bit(case):
    key, value = drawn(case | {"source": "plane's dtype"})
    rows = torch.tensor(case["rows"], dtype=torch.int64)
    plane = plane_of(case, fill=7.0)
    vectorized.store_rows(plane, rows, key, value)

    for kernel in (reference, vectorized):
        got = kernel.gather_rows(plane, rows)

        assert all(map(same_bits, (key, value), got))
        assert all(part.is_contiguous() for part in got)


@IN_BOTH_LAYOUTS
def test_a_gathered_row_is_a_copy(layout):
    for rows in ([1, 2], [2, 0]):
        plane = make_plane(layout, 3, fill=1.0)
        key, value = vectorized.gather_rows(plane, torch.tensor(rows))
        plane.flat.fill_(2.0)

        assert torch.all(key == 1.0)
        assert torch.all(value == 1.0)


@KERNELS
@NARROW
@pytest.mark.parametrize("count", [1, 3, 16, 17, 33])
def test_float32_is_rounded_to_nearest_even_wherever_it_lies(kernel, dtype, count):
    wanted = [reference.nearest(number, dtype) for number in HARD_FLOAT32.tolist()]
    expected = bits(torch.tensor(wanted, dtype=torch.float32).to(dtype))
    expected[HARD_FLOAT32.isnan()] = 0x7FFF
    plane = make_plane("token_major", count, heads=1, dims=(len(wanted),) * 2, dtype=dtype)
    source = HARD_FLOAT32.expand(1, count, 1, -1)
    kernel.store_rows(plane, torch.arange(count), source, source.clone())

    assert torch.equal(expected.expand(count, -1), bits(plane.key[0, :, 0]))
    assert torch.equal(expected.expand(count, -1), bits(plane.value[0, :, 0]))


def test_the_largest_half_stays_and_the_middle_above_it_becomes_infinite():
    source = [65504.0, 65519.99, 65520.0, -65520.0]
    expected = [65504.0, 65504.0, math.inf, -math.inf]

    assert expected == rounded(torch.tensor(source), torch.float16).tolist()
    assert expected == [reference.nearest(number, torch.float16) for number in source]


@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES[:2]))
def test_any_float32_is_rounded_as_arithmetic_says(pattern, dtype):
    source = from_bits(pattern)
    nearest = torch.tensor([reference.nearest(source.item(), dtype)], dtype=dtype)

    assert bits(nearest).item() == bits(rounded(source, dtype)).item() or source.isnan()


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_planes_own_dtype_is_copied_nan_payload_and_all(kernel, dtype):
    patterns = [0x7E01, 0xFE01, 0x7D01, 0xFFFF, 0x8000, 0x0001, 0x7F81, 0xFF81]
    raw = torch.tensor(patterns, dtype=torch.uint16)
    if dtype is torch.float32:
        raw = (raw.to(torch.int64) * 65537).to(torch.uint32)
    source = raw.view(dtype).view(1, 2, 1, 4)
    plane = make_plane("head_major", 5, heads=1, dtype=dtype)
    kernel.store_rows(plane, torch.tensor([4, 1]), source, source)

    assert same_bits(source, plane.key[:, [4, 1]])
    assert same_bits(source, plane.value[:, [4, 1]])


BAD_INPUT = {
    "int32 rows": (TensorMismatch, {"rows": torch.tensor([0, 1], dtype=torch.int32)}),
    "rows of two axes": (TensorMismatch, {"rows": torch.tensor([[0, 1]])}),
    "a list of rows": (TensorMismatch, {"rows": [0, 1]}),
    "rows elsewhere": (TensorMismatch, {"rows": torch.zeros(2, dtype=torch.int64, device="meta")}),
    "fewer rows": (TensorMismatch, {"rows": torch.tensor([0])}),
    "a row past the end": (ArgumentError, {"rows": torch.tensor([0, 4])}),
    "a negative row": (ArgumentError, {"rows": torch.tensor([-2, 1])}),
    "a huge row": (ArgumentError, {"rows": torch.tensor([0, 2**32])}),
    "a row twice": (ArgumentError, {"rows": torch.tensor([3, 3])}),
    "bfloat16 key": (TensorMismatch, {"key": torch.zeros(1, 2, 2, 4, dtype=torch.bfloat16)}),
    "float64 key": (TensorMismatch, {"key": torch.zeros(1, 2, 2, 4, dtype=torch.float64)}),
    "whole numbers": (TensorMismatch, {"value": torch.zeros(1, 2, 2, 4, dtype=torch.int16)}),
    "another head_dim": (TensorMismatch, {"key": torch.zeros(1, 2, 2, 5)}),
    "other heads": (TensorMismatch, {"value": torch.zeros(1, 2, 1, 4)}),
    "another batch": (TensorMismatch, {"value": torch.zeros(2, 2, 2, 4)}),
    "a key elsewhere": (TensorMismatch, {"key": torch.zeros(1, 2, 2, 4, device="meta")}),
    "no value": (TensorMismatch, {"value": None}),
}


@KERNELS
@pytest.mark.parametrize(("error", "changed"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_refused_and_no_row_changes(kernel, error, changed):
    plane = make_plane("token_major", 4, fill=3.0)
    rows = torch.zeros(1, 2, 2, 4)
    call = {"rows": torch.tensor([0, 1]), "key": rows, "value": rows} | changed

    with pytest.raises(error):
        kernel.store_rows(plane, **call)

    assert torch.all(plane.flat == 3.0)


@KERNELS
@pytest.mark.parametrize("rows", [torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([4])])
def test_rows_that_do_not_exist_cannot_be_gathered(kernel, rows):
    with pytest.raises((ArgumentError, TensorMismatch)):
        kernel.gather_rows(make_plane("token_major", 4), rows)


@KERNELS
def test_b06_the_end_of_a_chunk_longer_than_the_ring_lands_as_single_appends_would(kernel):
    source = torch.arange(10.0).view(1, 10, 1, 1).expand(1, 10, 1, 4)
    plane, single = (make_plane("token_major", 4, heads=1) for _ in range(2))
    for position in range(10):
        token = source[:, position : position + 1]
        kernel.store_rows(single, torch.tensor([position % 4]), token, token)
    # the cursor says: source_first 6, rows 2, 3, 0, 1
    kernel.store_rows(plane, torch.tensor([2, 3, 0, 1]), source[:, 6:], source[:, 6:])

    assert [8, 9, 6, 7] == plane.key[0, :, 0, 0].tolist()
    assert same_bits(single.flat, plane.flat)


@KERNELS
def test_b75_a_row_lands_where_each_layout_says(kernel):
    position, head, dim = 9, 1, 2
    key = torch.tensor([[100 * position + 10 * h + d for d in range(4)] for h in range(2)])
    key = key.half().view(1, 1, 2, 4)
    token_major, head_major = make_plane("token_major", 8), make_plane("head_major", 8)
    for plane in (token_major, head_major):
        kernel.store_rows(plane, torch.tensor([1]), key, -key)
    rows = token_major.key[0].stride(0)

    # keys alone are 8 elements a row; beside its values a row is 16
    assert 912 == token_major.flat.flatten()[1 * rows + head * 4 + dim].item()
    assert -912 == token_major.flat.flatten()[1 * rows + 8 + head * 4 + dim].item()
    assert 912 == head_major.flat[(head * 8 + 1) * 4 + dim].item()
    assert -912 == head_major.flat[64 + (head * 8 + 1) * 4 + dim].item()
    assert 0 == head_major.flat[14].item()


@KERNELS
def test_b75_rows_move_between_layouts_by_value(kernel):
    source, target = make_plane("token_major", 8), make_plane("head_major", 8)
    source.flat.copy_(torch.arange(source.flat.numel()).view_as(source.flat))
    rows = torch.tensor([5, 6, 7, 0, 1])
    kernel.store_rows(target, rows, *kernel.gather_rows(source, rows))

    assert same_bits(source.key[:, rows], target.key[:, rows])
    assert same_bits(source.value[:, rows], target.value[:, rows])


@IN_BOTH_LAYOUTS
@pytest.mark.parametrize("row", [0, 131_071, 8_388_607, 8_388_608, 8_519_679])
def test_b96_addresses_pass_two_to_the_31_without_loss(layout, row):
    # no memory behind it: what is looked at is the offset a copy would start from
    with torch.device("meta"):
        plane = make_plane(layout, 65 * 131_072, heads=2, dims=(128, 128))
    if layout == "token_major":
        expected = row * 512, row * 512 + 256
    else:
        expected = row * 128, (2 * 65 * 131_072 + row) * 128

    assert expected == (
        plane.key[:, row : row + 1].storage_offset(),
        plane.value[:, row : row + 1].storage_offset(),
    )
    assert max(expected) > 2**31 or row < 8_388_607


def test_rows_that_carry_gradients_leave_none_in_the_plane():
    plane = make_plane("token_major", 4, dtype=torch.float32)
    source = torch.ones(1, 1, 2, 4, requires_grad=True)
    for kernel in (reference, vectorized):
        kernel.store_rows(plane, torch.tensor([2]), source, source)

        assert not plane.key.requires_grad
        assert not plane.flat.requires_grad


def test_b77_bfloat16_rows_keep_their_values_in_half_precision():
    source = torch.tensor([0x3E25, 0x433C, 0x43DA], dtype=torch.uint16).view(torch.bfloat16)

    assert source.tolist() == converted(source, torch.float16, what="key").tolist()
    assert [188.0, 436.0] == converted(source, torch.float16, what="key").tolist()[1:]


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (torch.tensor([1.0, 1e6]), torch.float16),
        (torch.tensor([1.0, -65520.0]), torch.float16),
        (torch.tensor([1.0, 65536.0], dtype=torch.bfloat16), torch.float16),
        (torch.tensor([1.0, 3.4e38]), torch.bfloat16),
    ],
)
def test_b77_a_value_that_does_not_fit_is_refused(source, dtype):
    with pytest.raises(Overflow) as refused:
        converted(source, dtype, what="key of layer 3")

    assert source[1].item() == refused.value.value
    assert "key of layer 3" == refused.value.what
    assert str(dtype).endswith(refused.value.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_what_fits_is_converted_to_the_nearest_and_infinities_stay(source, dtype):
    numbers = torch.tensor([0.0, -0.0, 1.00390625, -57344.0, 2.0**-24, math.inf, -math.inf])
    numbers = numbers.to(source)
    same = dtype in (source, torch.float32)
    nearest = [n if same else reference.nearest(n, dtype) for n in numbers.tolist()]
    got = converted(numbers, dtype, what="key")

    assert dtype is got.dtype
    assert nearest == got.tolist()
    assert got.signbit()[1]
    assert converted(torch.tensor([math.nan]), dtype, what="key").isnan()


def test_a_dtype_that_no_plane_has_is_no_door():
    for source, dtype in ((torch.float64, torch.float16), (torch.float16, torch.int16)):
        with pytest.raises(TensorMismatch):
            converted(torch.zeros(2, dtype=source), dtype, what="key")
