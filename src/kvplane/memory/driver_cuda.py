"""Address space and pages of a GPU, by the driver's own calls (cuda.bindings).

Physical pages and the addresses they are seen at are two things: a page can be seen at several
addresses, and addresses can be held without any page. Every call here waits for nothing but
`settle`; whoever takes a page from under an address settles first.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kvplane.errors import MemoryUnavailable

# of the larger of two allocations that read zeros
BLANK_PAGES = 8


class Driver(Protocol):
    """What mapped memory asks of a device.

    Attributes:
        page_nbytes: of a physical page; everything is a multiple of it.
    """

    page_nbytes: int

    def reserve(self, nbytes: int) -> "AddressSpan":
        """Addresses without pages: MemoryUnavailable."""
        ...

    def create(self, num_pages: int) -> Any:  # noqa: ANN401 - the driver's own name
        """Physical pages in one allocation: MemoryUnavailable."""
        ...

    def release(self, handle: Any) -> None:  # noqa: ANN401
        """Give a page back; nothing shows it any more."""
        ...

    def settle(self) -> None:
        """Wait until no queued work can read or write any page."""
        ...

    def is_busy(self) -> bool:
        """Whether a wait is forbidden now: a graph is being captured."""
        ...


class AddressSpan(Protocol):
    """Reserved addresses; they go back when the last tensor over them is gone."""

    tensor: Tensor
    page_nbytes: int

    def map(self, first: int, shown: Sequence[tuple[Any, int]]) -> None:
        """Show allocations of so many pages from byte `first` on: MemoryUnavailable."""
        ...

    def unmap(self, first: int, nbytes: int) -> None:
        """Show nothing at [first, first + nbytes), which holds whole allocations."""
        ...

    def blank(self, first: int, nbytes: int) -> None:
        """Show zeros at [first, first + nbytes), for tensors that are left: MemoryUnavailable."""
        ...


class CudaDriver:
    """One CUDA device.

    Args:
        device: its number counts.

    Raises:
        MemoryUnavailable: the driver refuses.
    """

    def __init__(self, device: torch.device) -> None:
        self.cu = _bindings()
        self.device = device
        # PyTorch's context is the one whose addresses these are
        torch.cuda.synchronize(device)
        where = self.cu.CUmemLocation()
        where.type = self.cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        where.id = _number(device)
        self._kind = self.cu.CUmemAllocationProp()
        self._kind.type = self.cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = where
        self.access = self.cu.CUmemAccessDesc()
        self.access.location = where
        self.access.flags = self.cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = self.cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_nbytes = int(
            self.call(
                "asking for the page size", 0, "cuMemGetAllocationGranularity", self._kind, least
            )
        )
        # addresses of tensors that went while a graph was captured
        self.later: list[Callable[[], None]] = []
        # seen where a tensor is left over addresses that have no page of their own any more
        self.blanks = [(self.create(count), count) for count in (BLANK_PAGES, 1)]
        for _, count in self.blanks:
            span = CudaSpan(self, count * self.page_nbytes)
            span.blank(0, span.nbytes)
            span.tensor.zero_()

    def call(self, what: str, nbytes: int, name: str, *args: Any) -> Any:  # noqa: ANN401 - any call
        """A driver's answer: MemoryUnavailable with its error's name."""
        error, *rest = getattr(self.cu, name)(*args)
        if error != self.cu.CUresult.CUDA_SUCCESS:
            raise MemoryUnavailable(f"{what} of {nbytes} bytes failed: {error.name}")
        return rest[0] if rest else None

    def reserve(self, nbytes: int) -> "CudaSpan":
        """Addresses, and a tensor over them."""
        while self.later:
            self.later.pop()()
        return CudaSpan(self, nbytes)

    def create(self, num_pages: int) -> Any:  # noqa: ANN401 - a handle
        """Pages; PyTorch's unused memory is given up for them where there are no others."""
        nbytes = num_pages * self.page_nbytes
        args = ("taking pages", nbytes, "cuMemCreate", nbytes, self._kind, 0)
        try:
            return self.call(*args)
        except MemoryUnavailable:
            torch.cuda.empty_cache()
            return self.call(*args)

    def release(self, handle: Any) -> None:  # noqa: ANN401
        """The driver has the page again."""
        self.call("giving a page back", self.page_nbytes, "cuMemRelease", handle)

    def settle(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self.device)

    def is_busy(self) -> bool:
        """Whether this thread captures a graph."""
        return torch.cuda.is_current_stream_capturing()


class _Memory:
    """What PyTorch makes a tensor of; the tensor keeps it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


class CudaSpan:
    """Addresses of a device.

    Args:
        driver: the device's.
        nbytes: whole pages.
    """

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver = driver
        self.nbytes = nbytes
        self.page_nbytes = page = driver.page_nbytes
        found = driver.call(
            "reserving addresses", nbytes, "cuMemAddressReserve", nbytes, page, 0, 0
        )
        self._address = int(found)
        # pages shown, for the end of it all: by first byte, how many bytes
        self._shown: dict[int, int] = {}
        memory = _Memory(self._address, nbytes)
        weakref.finalize(memory, _free, driver, self._address, nbytes, self._shown).atexit = False
        # PyTorch asks whose memory the first byte is: something must be there
        self.map(0, driver.blanks[-1:])
        self.tensor = torch.as_tensor(memory, device=driver.device)
        self.unmap(0, page)

    def map(self, first: int, shown: Sequence[tuple[Any, int]]) -> None:
        """Show allocations, and allow reading and writing of all of them."""
        driver, page = self._driver, self.page_nbytes
        done = first
        try:
            for handle, num_pages in shown:
                nbytes = num_pages * page
                driver.call(
                    "mapping", nbytes, "cuMemMap", self._address + done, nbytes, 0, handle, 0
                )
                self._shown[done] = nbytes
                done += nbytes
            driver.call(
                "allowing access",
                done - first,
                "cuMemSetAccess",
                self._address + first,
                done - first,
                [driver.access],
                1,
            )
        except BaseException:
            if done > first:
                self.unmap(first, done - first)
            raise

    def unmap(self, first: int, nbytes: int) -> None:
        """Show nothing there, in one call."""
        self._driver.call("unmapping", nbytes, "cuMemUnmap", self._address + first, nbytes)
        for at in [at for at in self._shown if first <= at < first + nbytes]:
            del self._shown[at]

    def blank(self, first: int, nbytes: int) -> None:
        """Show the driver's zero pages there, as often as it takes."""
        (many, count), (one, _) = self._driver.blanks
        times, left = divmod(nbytes // self.page_nbytes, count)
        self.map(first, [(many, count)] * times + [(one, 1)] * left)


def _free(driver: CudaDriver, address: int, nbytes: int, shown: dict[int, int]) -> None:
    """Give addresses back, once no tensor is left over them."""
    if driver.is_busy():
        # a wait would end the capture
        driver.later.append(lambda: _free(driver, address, nbytes, shown))
        return
    if shown:
        driver.settle()
    for at, size in shown.items():
        driver.call("unmapping", size, "cuMemUnmap", address + at, size)
    driver.call("giving addresses back", nbytes, "cuMemAddressFree", address, nbytes)


def _bindings() -> Any:  # noqa: ANN401 - a module
    from cuda.bindings import driver  # noqa: PLC0415 - only where a GPU is used

    return driver


@cache
def _driver(number: int) -> CudaDriver:
    return CudaDriver(torch.device("cuda", number))


def driver_of(device: torch.device) -> CudaDriver:
    """The one driver of a device in this process: its zero pages are held once."""
    return _driver(_number(device))


def _number(device: torch.device) -> int:
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index


def why_not(device: torch.device) -> str | None:
    """None where pages of a device can be mapped; else why not."""
    try:
        cu = _bindings()
    except ImportError:
        return "needs cuda-bindings: pip install 'kvplane[gpu]'"
    number = _number(device)
    what = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    torch.cuda.synchronize(device)
    error, supported = cu.cuDeviceGetAttribute(what, number)
    if error != cu.CUresult.CUDA_SUCCESS:
        return f"needs a newer driver: {error.name}"
    return None if supported else "needs a GPU whose driver maps pages"
