"""Rows between planes and blobs: every width of a head, both layouts, and every bit."""

import itertools

import pytest
import torch
from made_by_hand import geometry_of

from kvplane import KVStore, Layout
from kvplane.pack import Fingerprint, copies, load_session, open_root, save_session
from kvplane.pack.copies import copy_in, copy_out, place_of, word, words_of
from kvplane.storage import MemoryStorage

LAYOUTS = [
    dict(zip(("sliding_attention", "full_attention"), pair, strict=True))
    for pair in itertools.product(Layout, repeat=2)
]
INTEGERS = {2: torch.int16, 4: torch.int32}


def random_bits(shape, dtype, seed):
    """Any bits at all: NaN payloads, subnormals, both zeros."""
    kind = INTEGERS[dtype.itemsize]
    facts = torch.iinfo(kind)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(facts.min, facts.max, shape, generator=generator, dtype=kind).view(dtype)


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["NN", "NH", "HN", "HH"])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "value_dim"),
    [("float16", 1, 1, 1), ("bfloat16", 2, 3, 4), ("float32", 3, 1, 5), ("float16", 2, 6, 128)],
)
def test_rows_of_any_shape_come_back_bit_for_bit_across_the_seam(
    dtype, heads, dim, value_dim, layout, far, monkeypatch
):
    if far:
        # memory of another device is copied by torch
        monkeypatch.setattr(copies, "is_near", lambda tensor: tensor is None)
    geometry = geometry_of(32, None, 32, dtype=dtype, heads=heads, dim=dim, value_dim=value_dim)
    fingerprint = Fingerprint.of(geometry, weights="bits")
    store = KVStore(geometry, max_context=512, memory="heap", layout=layout)
    session = store.open(tokens=[])
    for number, count in enumerate((256, 41)):
        with session.step(list(range(count))) as step:
            for layer in range(3):
                shapes = [(count, heads, size) for size in (dim, value_dim)]
                rows = [random_bits(shape, store.dtype, 10 * layer + number) for shape in shapes]
                step.write(layer, *rows)
    root = open_root(MemoryStorage(), create=True)
    save_session(root, "s", session, fingerprint)
    loaded = load_session(root, "s", store, fingerprint)[1].session

    for layer in range(3):
        live = session.live(layer)
        for one, two in zip(
            session.spans(layer, live.start, live.stop),
            loaded.spans(layer, live.start, live.stop),
            strict=True,
        ):
            for mine, other in zip(one, two, strict=True):
                kind = INTEGERS[mine.dtype.itemsize]
                assert torch.equal(mine.view(kind), other.view(kind))


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, 1), (2, 2), (6, 2), (4, 4), (12, 4), (8, 8), (24, 8), (512, 8)]
)
def test_a_word_is_the_widest_that_divides_a_row(nbytes, expected):
    assert expected == word(nbytes).itemsize


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float64).view(3, 4),
        torch.arange(12).view(3, 4).T,
        torch.tensor(7),
        torch.tensor([True, False, True]),
        torch.zeros(0, 3),
        torch.arange(6, dtype=torch.uint8)[::2],
        torch.randn(2, 4, requires_grad=True),
    ],
    ids=["f64", "transposed", "scalar", "bool", "empty", "strided", "grad"],
)
def test_any_tensor_is_copied_out_in_the_order_of_its_elements(tensor):
    data = bytearray(tensor.nbytes + 8)
    copy_out(tensor, data, 8)

    expected = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert bytes(8) + expected == bytes(data)


def test_words_are_a_view_that_writes_through():
    tensor = torch.zeros(2, 3, 4).half()
    source = words_of(torch.ones(2, 3, 4).half())
    copy_in(place_of(tensor), source)

    assert 8 == source.itemsize
    assert torch.equal(torch.ones(2, 3, 4).half(), tensor)
