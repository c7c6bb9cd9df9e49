"""Rows into pages and back, bit for bit, whatever a kernel makes of a page."""

import pytest
import torch

from kvplane.errors import TensorMismatch
from kvplane.integrations.vllm.copying import PagedLayer, PageLayout
from kvplane.integrations.vllm.planning import parts

SLOTS, HEADS, DIM = 16, 2, 8


def transposed(key, value, cache, slots):
    """A kernel that keeps keys by element, and values in pairs of slots."""
    num_slots = cache.shape[2]
    flat = cache.view(-1)
    for row, slot in enumerate(slots.tolist()):
        for element in range(DIM):
            flat[element * num_slots + slot] = key[row, 0, element]
            pair = num_slots * DIM + (slot // 2) * 2 * DIM + 2 * element + slot % 2
            flat[pair] = value[row, 0, element]


def rows(count):
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(-(1 << 15), 1 << 15, (2, count, HEADS, DIM), generator=generator)
    key, value = bits.to(torch.int16).view(torch.bfloat16)
    return key, value


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize(("first", "stop"), [(0, 1), (5, 70), (16, 32), (31, 33), (3, 96)])
def test_rows_come_back_and_no_other_slot_changes(probed, first, stop):
    layout = PageLayout.probed(transposed, SLOTS, DIM, DIM, torch.bfloat16) if probed else None
    cache = torch.zeros(9, HEADS, SLOTS, 2 * DIM, dtype=torch.bfloat16)
    paged = PagedLayer(cache, layout, DIM)
    table = [4, 1, 8, 2, 6, 3]
    key, value = rows(stop - first)
    where = list(parts(table, SLOTS, first, stop))
    paged.write(where, first, key, value)
    got_key, got_value = paged.read(where)
    assert torch.equal(bits(got_key), bits(key))
    assert torch.equal(bits(got_value), bits(value))
    others = list(parts(table, SLOTS, 0, len(table) * SLOTS))
    everything = torch.cat([bits(tensor) for tensor in paged.read(others)])
    assert int((everything != 0).sum()) <= 2 * (stop - first) * HEADS * DIM
    assert not bits(cache[[0, 5, 7]]).any()


def test_a_block_of_several_pages():
    cache = torch.zeros(4, HEADS, SLOTS, 2 * DIM, dtype=torch.bfloat16)
    paged = PagedLayer(cache, None, DIM, split=2)
    key, value = rows(20)
    where = list(parts([1], 2 * SLOTS, 4, 24))
    paged.write(where, 4, key, value)
    assert torch.equal(bits(paged.read(where)[0]), bits(key))
    assert torch.equal(bits(cache[3, :, :8, :DIM]), bits(key[12:].transpose(0, 1)))


def test_probing_finds_every_element():
    layout = PageLayout.probed(transposed, SLOTS, DIM, DIM, torch.bfloat16)
    places = torch.cat([layout.key.reshape(-1), layout.value.reshape(-1)])
    assert sorted(places.tolist()) == list(range(2 * SLOTS * DIM))
    assert int(layout.key[3, 5]) == 5 * SLOTS + 3


def test_a_kernel_that_loses_elements_is_refused():
    def lossy(key, value, cache, slots):
        transposed(key[:-1], value[:-1], cache, slots[:-1])

    with pytest.raises(TensorMismatch):
        PageLayout.probed(lossy, SLOTS, DIM, DIM, torch.bfloat16)
