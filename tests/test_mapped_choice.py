"""Which memory a store gets: by name that or an error, automatically the best that works."""

import logging

import pytest
import torch

import tiny
from kvplane.errors import ArgumentError, BackendUnavailable, MemoryUnavailable
from kvplane.memory import choose, mapped_cpu
from kvplane.memory.heap import HeapBackend, HeapSpan


def test_memory_asked_for_by_name_is_that_or_an_error():
    cpu = torch.device("cpu")

    assert ("heap", "asked for") == (choose("heap", cpu).backend.name, choose("heap", cpu).why)
    assert "mapped" == choose("mapped", cpu).backend.name
    with pytest.raises(ArgumentError):
        choose("disk", cpu)
    with pytest.raises(BackendUnavailable, match="is for the CPU") as refused:
        choose("mapped", torch.device("meta"))

    assert "mapped" == refused.value.backend


def test_memory_chosen_automatically_falls_back_and_says_so_once(monkeypatch, caplog):
    reason = "cannot be had in this test"
    monkeypatch.setattr(mapped_cpu, "unavailable", lambda _device: reason)
    with caplog.at_level(logging.INFO, logger="kvplane"):
        stores = [tiny.store(4, None, memory="auto") for _ in range(3)]

    assert ["heap"] * 3 == [store.describe().memory["backend"] for store in stores]
    assert reason in stores[0].describe().memory["why"]
    assert 1 == sum(reason in record.message for record in caplog.records)
    with pytest.raises(BackendUnavailable, match=reason):
        tiny.store(4, None, memory="mapped")


def test_a_heap_span_of_another_device_is_one_tensor():
    span = HeapSpan(64, torch.device("meta"))

    assert (64,) == span.tensor().shape
    assert 1 == HeapBackend(torch.device("meta")).page_nbytes


@pytest.mark.parametrize("lacking", ["MAP_ANONYMOUS", "MADV_DONTNEED", "MADV_NOHUGEPAGE"])
def test_a_heap_span_is_zero_on_systems_that_lack_something(monkeypatch, lacking):
    monkeypatch.delattr("mmap." + lacking)
    span = HeapSpan(8192, torch.device("cpu"))

    assert not span.tensor().any()

    span.tensor().fill_(7)
    span.discard()

    assert not span.tensor().any()


@pytest.mark.parametrize("nbytes", [-1, 1 << 62, 1 << 70])
def test_heap_memory_that_cannot_be_had_is_a_typed_error(nbytes):
    with pytest.raises(MemoryUnavailable, match="cannot be had"):
        HeapSpan(nbytes, torch.device("cpu"))


def test_the_heap_shares_no_pages():
    span = HeapSpan(64, torch.device("cpu"))
    span.back([range(3)])

    assert span.hold([range(3)]) is None
    assert span.counts() is None
