"""What graphs refuse where there is no GPU: before a model is touched."""

import subprocess
import sys

import pytest
import torch

from kvplane.errors import ArgumentError
from kvplane.integrations.transformers import HybridCache
from kvplane.integrations.transformers.options import Options, numerics_of
from kvplane.models.nano import load_nano

FACTS = {"max_context": 64, "memory": "auto", "slack": 0, "limit": None}


def test_graphs_need_a_model_on_a_cuda_device():
    model = load_nano()
    with pytest.raises(ArgumentError, match=r"graphs.*CUDA.*cpu"):
        HybridCache(model, graphs=True)
    with pytest.raises(ArgumentError, match=r"graphs.*CUDA"):
        HybridCache(model.config, graphs=True)

    assert "forward" not in model.__dict__


def test_graphs_are_of_the_stores_own_order():
    with pytest.raises(ArgumentError, match="attention"):
        Options(attention="view", graphs="captured", **FACTS)
    with pytest.raises(ArgumentError, match="graphs"):
        Options(attention="kvplane", graphs="fast", **FACTS)

    assert Options(attention="kvplane", **FACTS).graphs is None


def test_rows_of_compiled_layers_say_so():
    options = Options(attention="kvplane", graphs="compiled", **FACTS)
    plain = Options(attention="kvplane", graphs="captured", **FACTS)

    assert "compiled" == numerics_of(options, {}, "kvplane")["layers"]
    assert "layers" not in numerics_of(plain, {}, "kvplane")


def test_a_graph_of_rows_on_a_cpu_is_refused():
    from kvplane.integrations.graphs import DecodeGraph

    model = load_nano()
    cache = HybridCache(model, attention="kvplane", max_context=64)
    with torch.no_grad():
        model(input_ids=torch.tensor([[256, 65, 66]]), cache=cache)

    with pytest.raises(ArgumentError, match=r"cache.*CUDA device.*cpu"):
        DecodeGraph(model, cache)

    assert 3 == cache.seen


def test_a_cpu_store_imports_nothing_of_a_gpu():
    code = (
        "import sys\n"
        # neither is installed
        "sys.modules['triton'] = sys.modules['cuda'] = None\n"
        "import kvplane, torch\n"
        "from kvplane.geometry import ModelGeometry\n"
        "from kvplane.integrations.transformers import HybridCache\n"
        "g = ModelGeometry.uniform(['sliding_attention', 'full_attention'], sliding_window=8,"
        " num_kv_heads=1, head_dim=16, dtype='float16')\n"
        "s = kvplane.KVStore(g, max_context=64).open()\n"
        "row = torch.zeros(1, 1, 16, dtype=torch.float16)\n"
        "with s.step(1) as step:\n"
        "    [step.attend(layer, row, row, row) for layer in range(2)]\n"
        "s.fork().snapshot()\n"
        "ours = [name for name in sys.modules if name.startswith('kvplane')]\n"
        "print([m for m in ours if 'triton' in m or 'cuda' in m or '.graphs' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]" == done.stdout.strip()
