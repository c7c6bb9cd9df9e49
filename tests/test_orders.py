"""Which attention a device gets, and that a CPU never meets Triton."""

import subprocess
import sys

import pytest
import torch

from kvplane.attention import blocked
from kvplane.errors import ExtraMissing
from kvplane.orders import order_numerics, order_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_store_on_a_cpu_imports_no_triton():
    code = (
        "import sys, kvplane.store as s, kvplane.geometry as g\n"
        "layer = g.LayerGeometry(kind='full_attention', num_kv_heads=1, head_dim=8,"
        " value_head_dim=8)\n"
        "s.KVStore(g.ModelGeometry(layers=(layer,)), max_context=64).open()\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )

    assert "False" == done.stdout.strip()


def test_a_cpu_and_the_contrast_keep_the_torch_orders():
    assert blocked.attend is order_of("blocked", CPU)
    assert "torch" == order_numerics("blocked", CPU)["kernel"]
    assert "torch" == order_numerics("physical", GPU)["kernel"]


def test_a_gpu_says_that_its_order_is_triton_s_and_of_which_table():
    from kvplane.attention.triton_table import TABLE

    wanted = {"attention": "blocked", "table": TABLE, "kernel": "triton"}

    assert wanted == order_numerics("blocked", GPU)


def test_a_gpu_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("kvplane.attention.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)

    with pytest.raises(ExtraMissing, match="triton is not installed"):
        order_of("blocked", GPU)
    with pytest.raises(ExtraMissing, match="triton is not installed"):
        order_numerics("blocked", GPU)
