"""The processor in a store's numerics: equal where libraries take equal kernels."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
from kvplane import processor

CPU = torch.device("cpu")
CODE = (
    "import torch; from kvplane.processor import processor_of as p; print(p(torch.device('cpu')))"
)


def test_numerics_name_the_processor():
    store = tiny.store(4, None)

    assert processor.processor_of(CPU) == store.numerics["processor"]
    assert processor.processor_of(CPU) == store.describe().numerics["processor"]


def test_another_instruction_set_is_another_processor():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert done.stdout.strip() != processor.processor_of(CPU)
    assert done.stdout.strip().endswith(processor.cpu_kind())


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nvendor_id : A\ncpu family : 26\nmodel : 2\n\nmodel : 3\n", "A 26 2"),
        ("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\n", "0x41 0xd0c"),
        ("nothing of use\n", platform.machine()),
        ("", platform.machine()),
    ],
    ids=["x86", "arm", "unknown", "empty"],
)
def test_a_cpu_is_its_maker_and_model(cpuinfo, expected):
    assert expected == processor.kind_in(cpuinfo)


def test_a_system_that_does_not_say_gives_its_architecture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processor, "CPUINFO", Path("/nowhere"))

    assert processor.cpu_kind.__wrapped__() in {platform.processor(), platform.machine()}


def test_a_gpu_is_its_name_and_another_device_its_architecture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")

    assert "GPU 1" == processor.processor_of(torch.device("cuda", 1))
    assert platform.machine() == processor.processor_of(torch.device("meta"))
