"""Bitwise the stock cache: every model class, every way of generating, every dtype.

A sample runs always, in each kind of memory: each model in each dtype, each way of generating in
each dtype, over several windows. All combinations are `make matrix`.
"""

import pytest
import torch

import zoo
from kvplane.errors import PositionError
from zoo import modes

torch.set_num_threads(1)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = zoo.names()
STATEFUL = ("lara_mini", "qwen3_next", "recurrent_gemma")
# transformers itself refuses these, whatever the cache
STOCK_REFUSES = {
    **{(name, mode): ValueError for name in STATEFUL for mode in ("prompt_lookup", "assistant")},
    ("recurrent_gemma", "chunked_prefill"): AttributeError,
}
# these would need states that the model keeps to itself; the stock cache goes on with wrong ones
REFUSED = {("recurrent_gemma", "beams"), ("recurrent_gemma", "fork")}


def compare(name, dtype, mode, attention=None, memories=("heap", "mapped")):
    model = zoo.build(name, dtype, attention=attention)
    run = modes.MODES[mode]
    if (name, mode) in STOCK_REFUSES:
        for make in (modes.stock, modes.ours):
            with pytest.raises(STOCK_REFUSES[name, mode]):
                run(model, lambda make=make: make(model))
        return
    if (name, mode) in REFUSED:
        with pytest.raises(PositionError, match="the model itself keeps the states"):
            run(model, lambda: modes.ours(model))
        return
    expected = run(model, lambda: modes.stock(model))
    different = [
        (memory, step)
        for memory in memories
        for found in [run(model, lambda memory=memory: modes.ours(model, memory=memory))]
        for step, (one, other) in enumerate(zip(expected, found, strict=True))
        if not torch.equal(one, other)
    ]

    assert [] == different


def sample():
    """Each model in each dtype, its modes taken in turn."""
    names = list(modes.MODES)
    for number, name in enumerate(NAMES):
        for place, dtype in enumerate(DTYPES):
            yield pytest.param(
                name,
                dtype,
                names[(number * len(DTYPES) + place) % len(names)],
                id=f"{name}-{str(dtype).removeprefix('torch.')}",
            )


@pytest.mark.parametrize(("name", "dtype", "mode"), list(sample()))
def test_logits_and_text_are_the_stock_caches_bit_for_bit(name, dtype, mode):
    compare(name, dtype, mode)


def test_the_sample_meets_every_mode_in_every_dtype():
    met = {(mode, dtype) for _, dtype, mode in (case.values for case in sample())}

    assert {(mode, dtype) for mode in modes.MODES for dtype in DTYPES} == met


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", modes.MODES)
def test_the_model_that_the_store_is_named_after_is_met_in_every_mode(mode, dtype):
    compare("muse_glimmer", dtype, mode)


@pytest.mark.parametrize("mode", ["greedy", "left_padding"])
def test_eager_attention_reads_the_same_rows(mode):
    compare("muse_glimmer", torch.bfloat16, mode, attention="eager")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", modes.MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_matrix(name, mode, dtype):
    compare(name, dtype, mode, memories=("auto",))


@pytest.mark.slow
@pytest.mark.parametrize("mode", modes.MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_matrix_with_eager_attention(name, mode):
    compare(name, torch.bfloat16, mode, attention="eager", memories=("auto",))
