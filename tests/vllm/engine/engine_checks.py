"""Real engines on a CPU, each in a process of its own (make vllm): one stores, a new one loads."""

import json
import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

from kvplane.pack import open_root
from kvplane.pack.inventory import Kind, documents

HERE = Path(__file__).parent
SHARED = 700


@pytest.fixture(scope="session", params=sorted(tiny_models.MODELS))
def model(request, tmp_path_factory):
    """A model's folder."""
    return tiny_models.MODELS[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory):
    """One model, where the model does not matter."""
    return tiny_models.gemma(tmp_path_factory.mktemp("models") / "gemma")


def ids(seed, count):
    """Random ids that every small model has."""
    generator = random.Random(seed)
    return [generator.randrange(3, 250) for _ in range(count)]


def engine(folder, model, root, prompts, *, tokens=64, extra=None, **more):
    """What an engine in a new process said: its answers, digests of rows, and its messages."""
    file = folder / "ask.json"
    out = folder / "ask.json.out"
    out.unlink(missing_ok=True)
    asked = {"model": str(model), "root": None if root is None else str(root), "prompts": prompts}
    asked |= {"tokens": tokens, "extra": extra or {}} | more
    file.write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, str(HERE / "one_engine.py"), str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert out.exists(), (done.stdout + done.stderr)[-4000:]
    said = json.loads(out.read_text())
    lines = (done.stdout + done.stderr).splitlines()
    said["warnings"] = [line for line in lines if "kvplane:" in line]
    return said


def tokens_of(said):
    return [answer["tokens"] for answer in said["answers"]]


def cached_of(said):
    return [answer["cached"] for answer in said["answers"]]


def test_a_new_engine_goes_on_from_the_first_ones_rows(model, tmp_path):
    root = tmp_path / "root"
    prompt = ids(1, SHARED)
    first = engine(tmp_path, model, root, [prompt], extra={"every": 256})
    prompts = [
        prompt,
        prompt[:300] + ids(2, 300),
        prompt[:130] + ids(3, 50),
        ids(4, 200),
        prompt + ids(5, 30),
    ]
    # without vLLM's own prefixes, what is cached came out of the root
    second = engine(tmp_path, model, root, prompts, local_prefixes=False, extra={"every": 0})
    assert cached_of(first) == [0]
    # all blocks of the prompt, one, none, none, and every token of it
    assert cached_of(second) == [640, 256, 0, 0, SHARED]
    assert tokens_of(second)[0] == tokens_of(first)[0]
    assert not second["warnings"]
    cold = engine(tmp_path, model, None, prompts, local_prefixes=False)
    assert tokens_of(second) == tokens_of(cold)
    # byte-equal rows, on every layer
    filled = second["filled"]
    assert filled
    assert {key.split(".")[0] for key in filled} == {key.split(".")[0] for key in first["captured"]}
    assert all(first["captured"][key] == digest for key, digest in filled.items())
    kinds = [one.kind for one in documents(open_root(str(root))) if one.error is None]
    assert kinds.count(Kind.CUT) >= 4


def test_blocks_that_a_load_half_filled_are_nobody_elses_prefix(gemma, tmp_path):
    root = tmp_path / "root"
    prompt = ids(1, 300)
    engine(tmp_path, gemma, root, [prompt], tokens=1)
    # the second shares 256 tokens with the first, whose load left rows of that window out
    prompts = [[*prompt, 7, 8, 9], prompt[:256] + ids(6, 40)]
    warm = engine(tmp_path, gemma, root, prompts)
    cold = engine(tmp_path, gemma, None, prompts, local_prefixes=False)
    assert cached_of(warm)[0] == 300
    assert tokens_of(warm) == tokens_of(cold)


def test_a_damaged_blob_is_computed_and_said_once(gemma, tmp_path):
    root = tmp_path / "root"
    prompt = ids(1, SHARED)
    first = engine(tmp_path, gemma, root, [prompt])
    for blob in (root / "blobs").rglob("*.safetensors"):
        blob.chmod(stat.S_IRUSR | stat.S_IWUSR)
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.write_bytes(data)
    second = engine(tmp_path, gemma, root, [prompt, prompt], local_prefixes=False)
    assert tokens_of(second) == tokens_of(first) * 2
    assert len(second["warnings"]) == 1
    assert "a load failed" in second["warnings"][0]


def test_a_root_that_is_emptied_while_in_use(gemma, tmp_path):
    root = tmp_path / "root"
    prompt = ids(1, SHARED)
    first = engine(tmp_path, gemma, root, [prompt])
    between = {"empty": str(root)}
    second = engine(tmp_path, gemma, root, [prompt, between, prompt, prompt], local_prefixes=False)
    assert tokens_of(second) == tokens_of(first) * 3
    assert cached_of(second)[0] == 640


def test_a_root_that_cannot_be_used_at_all(gemma, tmp_path):
    root = tmp_path / "file"
    root.write_text("no folder")
    prompt = ids(1, SHARED)
    said = engine(tmp_path, gemma, root, [prompt, prompt], local_prefixes=False)
    cold = engine(tmp_path, gemma, None, [prompt, prompt], local_prefixes=False)
    assert tokens_of(said) == tokens_of(cold)
    assert cached_of(said) == [0, 0]
    assert 1 <= len(said["warnings"]) <= 2


def test_a_full_root(gemma, tmp_path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.fail("this check mounts a small file system: run it as root")
    root = tmp_path / "small"
    root.mkdir()
    done = subprocess.run(
        [shutil.which("mount"), "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)], check=False
    )
    assert done.returncode == 0
    try:
        prompt = ids(1, SHARED)
        said = engine(tmp_path, gemma, root, [prompt, prompt], local_prefixes=False)
    finally:
        subprocess.run([shutil.which("umount"), str(root)], check=False)
    cold = engine(tmp_path, gemma, None, [prompt], local_prefixes=False)
    assert tokens_of(said) == tokens_of(cold) * 2
    assert len([line for line in said["warnings"] if "could not be written" in line]) == 1


def test_a_slow_root_is_not_waited_for(gemma, tmp_path):
    root = tmp_path / "root"
    prompt = ids(1, SHARED)
    first = engine(tmp_path, gemma, root, [prompt])
    said = engine(
        tmp_path,
        gemma,
        root,
        [prompt],
        local_prefixes=False,
        extra={"match_timeout_s": 0, "load_timeout_s": 0},
    )
    assert tokens_of(said) == tokens_of(first)


def test_a_prefix_of_this_engine_is_loaded_by_a_transformers_cache(gemma, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from kvplane.integrations.transformers import HybridCache
    from kvplane.integrations.transformers.identity import fingerprint_of
    from kvplane.pack import PrefixCache

    root = tmp_path / "root"
    prompt = ids(1, SHARED)
    engine(tmp_path, gemma, root, [prompt])
    model = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.bfloat16).eval()
    match = PrefixCache(str(root), fingerprint_of(model)).match(prompt)
    assert match.position == 640
    cache = HybridCache.for_prompt(model, torch.tensor([prompt]), str(root))
    assert cache.origin.tokens == 640


def test_a_prefix_of_a_transformers_cache_is_loaded_by_an_engine(gemma, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from kvplane.integrations.transformers import HybridCache

    root = tmp_path / "root"
    prompt = ids(1, SHARED)
    model = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.bfloat16).eval()
    HybridCache.for_prompt(model, torch.tensor([prompt]), str(root))
    said = engine(tmp_path, gemma, root, [prompt], local_prefixes=False)
    assert cached_of(said) == [512]
    assert not said["warnings"]
