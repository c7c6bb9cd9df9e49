"""The kind of processor, as far as bits depend on it: libraries choose their kernels by it."""

import platform
from functools import cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def processor_of(device: torch.device) -> str:
    """What runs on a device, in words that are equal where the libraries take equal kernels.

    A CPU is its instruction set as PyTorch uses it, maker, family and model: a product in another
    instruction set, or one tuned for another maker, sums in another order. A GPU is its name.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return platform.machine()
    # read anew each time: PyTorch answers to ATEN_CPU_CAPABILITY
    return f"{torch.backends.cpu.get_cpu_capability()}, {cpu_kind()}"


@cache
def cpu_kind() -> str:
    """Maker, family and model of the CPU; its architecture where the system does not say."""
    try:
        return kind_in(CPUINFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return platform.processor() or platform.machine()


def kind_in(cpuinfo: str) -> str:
    """The same, of the text of /proc/cpuinfo."""
    first, _, _ = cpuinfo.strip().partition("\n\n")
    facts = {
        name.strip(): value.strip()
        for name, colon, value in (line.partition(":") for line in first.splitlines())
        if colon
    }
    known = [facts[name] for name in ("vendor_id", "cpu family", "model") if name in facts]
    # an ARM CPU has these instead
    known += [facts[name] for name in ("CPU implementer", "CPU part") if name in facts]
    return " ".join(known) or platform.machine()
