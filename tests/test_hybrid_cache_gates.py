"""Around every edge of the window: saved, forked, gone back and reused, the next 64 logits agree.

glimmer-nano's window is 128; `make matrix` does the same at 2,048.
"""

import functools
import subprocess
import sys

import pytest
import torch

import zoo
from kvplane.integrations.transformers import HybridCache, prefill
from kvplane.integrations.transformers.calls import call
from kvplane.models import BOS, encode, heldout_text, load_nano

torch.set_num_threads(1)

NEXT = 64
NANO, WIDE = 128, 2048
GATES = [
    pytest.param(window, at, id=f"window-{window}-at-{at}", marks=marks)
    for window, marks in ((NANO, ()), (WIDE, pytest.mark.slow))
    for at in (1, 31, 32, 33, *(n * window + step for n in (1, 2) for step in (-1, 0, 1)))
]
# beyond the wrap, beside and on the edges of chunks
PROMPTS = [
    pytest.param(window, at, id=f"window-{window}-at-{at}", marks=marks)
    for window, marks, places in (
        (NANO, (), (257, 512, 513)),
        (WIDE, pytest.mark.slow, (2559, 2560, 2561, 4097)),
    )
    for at in places
]


@functools.cache
def model_of(window):
    if window == NANO:
        return load_nano()
    config = zoo.configuration("muse_glimmer")
    config.text_config.sliding_window = window
    config.text_config.max_position_embeddings = 8192
    return zoo.build("muse_glimmer", config=config)


@functools.cache
def ids_of(window, length):
    if window == NANO:
        return [BOS, *encode(heldout_text())][:length]
    return zoo.text(5000)[0, :length].tolist()


def read(window, at, **options):
    """A cache that has read so many tokens on the canonical schedule."""
    cache = HybridCache(model_of(window), **options)
    prefill(model_of(window), cache, ids_of(window, at))
    return cache


def goes_on(window, cache, at, count=NEXT):
    """The logits of the next tokens of the text, one by one."""
    model = model_of(window)
    return torch.stack([call(model, cache, [i]) for i in ids_of(window, at + count)[at:]])


@functools.cache
def undisturbed(window, at):
    return goes_on(window, read(window, at), at)


PROCESS = """
import sys
import torch
from kvplane.integrations.transformers import HybridCache
from test_hybrid_cache_gates import goes_on, model_of

root, window = sys.argv[1], int(sys.argv[2])
for at in map(int, sys.argv[3:]):
    cache = HybridCache.load(root, model_of(window), name=str(at))
    assert (at, True) == (cache.origin.tokens, cache.origin.same_numerics)
    torch.save(goes_on(window, cache, at), f"{root}/{at}.pt")
"""


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(window, marks=marks, id=f"window-{window}")
        for window, marks in ((NANO, ()), (WIDE, pytest.mark.slow))
    ],
)
def test_a_new_process_goes_on_bit_for_bit_at_every_gate(window, tmp_path):
    places = [gate.values[1] for gate in GATES if gate.values[0] == window]
    for at in places:
        read(window, at).save(tmp_path, name=str(at))
    command = [sys.executable, "-c", PROCESS, str(tmp_path), str(window), *map(str, places)]
    subprocess.run(command, check=True, cwd="tests", capture_output=True)
    different = [
        at
        for at in places
        if not torch.equal(undisturbed(window, at), torch.load(tmp_path / f"{at}.pt"))
    ]

    assert [] == different


@pytest.mark.parametrize(("window", "at"), GATES)
def test_a_fork_and_what_it_was_forked_from_go_on_bit_for_bit(window, at):
    cache = read(window, at)
    fork = cache.fork()
    # they go different ways first, so that neither reads the other's rows
    ahead = goes_on(window, cache, at, count=9)

    assert torch.equal(undisturbed(window, at), goes_on(window, fork, at))
    assert torch.equal(undisturbed(window, at)[:9], ahead)
    assert torch.equal(undisturbed(window, at)[9:], goes_on(window, cache, at + 9, count=NEXT - 9))


@pytest.mark.parametrize(("window", "at"), GATES)
def test_what_was_gone_back_from_is_read_again_bit_for_bit(window, at):
    cache = read(window, at, slack=9)
    model = model_of(window)
    for token in ids_of(window, 9):
        call(model, cache, [token])
    cache.rewind(at)

    assert torch.equal(undisturbed(window, at), goes_on(window, cache, at))


@pytest.mark.parametrize(("window", "at"), PROMPTS)
def test_a_prefix_that_is_reused_goes_on_as_a_cold_run_on_the_schedule(window, at, tmp_path):
    model, ids = model_of(window), ids_of(window, at)
    HybridCache.for_prompt(model, ids, tmp_path)
    cache = HybridCache.for_prompt(model, ids, tmp_path, strict=True)

    assert (at - 1) // 256 * 256 == cache.origin.tokens
    prefill(model, cache, ids)
    assert torch.equal(undisturbed(window, at), goes_on(window, cache, at))


@pytest.mark.parametrize(("window", "at"), PROMPTS)
def test_a_cut_at_a_turns_end_goes_on_as_the_conversation_would_have(window, at, tmp_path):
    model = model_of(window)
    cache = HybridCache.for_prompt(model, ids_of(window, at), tmp_path)
    prefill(model, cache, ids_of(window, at))
    goes_on(window, cache, at, count=9)
    cache.publish()
    later = HybridCache.for_prompt(model, ids_of(window, at + 10), tmp_path)

    assert at + 9 == later.origin.tokens
    rest = goes_on(window, later, at + 9, count=NEXT - 9)
    assert torch.equal(undisturbed(window, at)[9:], rest)
