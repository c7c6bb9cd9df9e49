"""Saved and loaded by name, found by prefix: the next logits are those of not having stopped."""

import subprocess
import sys

import pytest
import torch

import zoo
from kvplane.errors import (
    ArgumentError,
    PackMismatch,
    SessionLocked,
    SessionNotFound,
)
from kvplane.integrations.transformers import HybridCache
from kvplane.pack import open_root
from zoo import modes

torch.set_num_threads(1)

# rows only; several shapes of rows; rows read by several layers; convolutions; recurrent states
SAVED = zoo.among(
    "muse_glimmer",
    "mimo_v2_flash",
    "gemma4_text_shared",
    "lfm2",
    "lfm3",
    "qwen3_next",
    "lara_mini",
)
NEXT = [*[1] * 20, 9, 1]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("length", [1, 5, 7, 8, 9, 16, 30, 300])
@pytest.mark.parametrize("name", SAVED)
def test_a_loaded_cache_goes_on_as_if_it_had_not_stopped(name, length, tmp_path):
    model = zoo.build(name, torch.bfloat16)
    ids = zoo.text(length + sum(NEXT))
    cache = HybridCache(model)
    modes.call(model, cache, ids[:, :length])
    cache.save(tmp_path)
    loaded = HybridCache.load(tmp_path, model)

    assert (length, True) == (loaded.origin.tokens, loaded.origin.same_numerics)
    assert ids[0, :length].tolist() == loaded.tokens
    rest = ids[:, length:]
    assert equal(modes.calls(model, cache, rest, NEXT), modes.calls(model, loaded, rest, NEXT))


PROCESS = """
import sys
import torch
import zoo
from kvplane.integrations.transformers import HybridCache
from zoo import modes

torch.set_num_threads(1)
model = zoo.build("lfm2")
cache = HybridCache.load(sys.argv[1], model)
ids = zoo.text(60)
assert cache.tokens == ids[0, : cache.seen].tolist()
torch.save(modes.calls(model, cache, ids[:, cache.seen :], [1] * 20), sys.argv[2])
"""


def test_another_process_goes_on_bit_for_bit(tmp_path):
    model = zoo.build("lfm2")
    cache = HybridCache(model)
    ids = zoo.text(60)
    modes.calls(model, cache, ids, [21, 1, 1])
    cache.save(tmp_path / "root")
    out = tmp_path / "logits.pt"
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "root"), str(out)]
    subprocess.run(command, check=True, cwd="tests", capture_output=True)

    assert equal(modes.calls(model, cache, ids[:, 23:], [1] * 20), torch.load(out))


def test_what_generate_answered_may_be_passed_as_the_tokens(tmp_path):
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model.config)
    out = modes.generate(model, cache, zoo.text(21), max_new_tokens=9)[0]
    cache.save(tmp_path, model, out)

    assert out[0, :-1].tolist() == HybridCache.load(tmp_path, model).tokens


def test_the_next_request_reuses_every_token_that_was_kept(tmp_path):
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    out = modes.generate(model, cache, zoo.text(21), max_new_tokens=9)[0]
    cache.save(tmp_path, tokens=out)
    loaded = HybridCache.load(tmp_path, model)
    prompt = torch.cat([out, zoo.text(5, seed=2)], dim=1)
    read = []

    def note(module, args, kwargs):
        del module, args
        read.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    mask = torch.ones_like(prompt)
    found = modes.generate(model, loaded, prompt, max_new_tokens=4, attention_mask=mask)
    hook.remove()

    assert (29, [6, 1, 1, 1]) == (loaded.origin.tokens, read)
    assert equal(modes.generate(model, cache, prompt, max_new_tokens=4, attention_mask=mask), found)


def test_names_are_sessions_of_one_root_and_share_what_is_equal(tmp_path):
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(300))
    first = cache.save(tmp_path, name="one")
    again = cache.save(tmp_path, name="two")

    assert (True, 0) == (first.blobs_written > 0, again.blobs_written)
    assert 300 == HybridCache.load(tmp_path, model, name="two").seen
    with pytest.raises(SessionNotFound, match="nearest: two"):
        HybridCache.load(tmp_path, model, name="tow")


def test_another_models_session_is_refused_by_the_part_that_differs(tmp_path):
    model, other = zoo.build("cohere2"), zoo.build("cohere2")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(5))
    cache.save(tmp_path)
    other.model.embed_tokens.weight.data[7, 7] += 1
    for wrong, field in (
        (other, "fingerprint.weights"),
        (zoo.build("cohere2", torch.bfloat16), "fingerprint"),
        (zoo.build("olmo3"), "fingerprint"),
    ):
        with pytest.raises(PackMismatch) as refusal:
            HybridCache.load(tmp_path, wrong)

        assert refusal.value.field.startswith(field)
    assert 5 == HybridCache.load(tmp_path, zoo.build("cohere2")).seen


def test_weights_may_be_named_by_the_caller(tmp_path):
    model = zoo.build("cohere2")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(5))
    cache.save(tmp_path, weights="mine")

    assert 5 == HybridCache.load(tmp_path, model, weights="mine").seen
    with pytest.raises(PackMismatch):
        HybridCache.load(tmp_path, model, weights="yours")


def test_a_session_in_use_is_not_written_over(tmp_path):
    model = zoo.build("cohere2")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(5))
    with open_root(tmp_path, create=True).lock("session"), pytest.raises(SessionLocked):
        cache.save(tmp_path)


def test_what_cannot_be_saved_is_refused(tmp_path):
    model = zoo.build("cohere2")
    cache = HybridCache(model)
    with pytest.raises(ArgumentError, match="at least one token"):
        cache.save(tmp_path)
    modes.call(model, cache, zoo.text(5))
    for tokens in (zoo.text(4), zoo.text(7), zoo.text(5, seed=1), zoo.text(5, batch=2), "hello"):
        with pytest.raises(ArgumentError):
            cache.save(tmp_path, tokens=tokens)
    batch = HybridCache(model)
    modes.call(model, batch, zoo.text(5, batch=2))
    with pytest.raises(ArgumentError, match=r"cache\.split\(\)"):
        batch.save(tmp_path)
    alone = HybridCache(model.config)
    with pytest.raises(ArgumentError, match="the one that made the rows"):
        alone.save(tmp_path)


def test_each_sequence_of_a_padded_batch_is_saved_by_itself(tmp_path):
    model = zoo.build("muse_glimmer")
    cache = HybridCache(model)
    ids, mask = modes.padded(19, 12)
    out = modes.generate(model, cache, ids, attention_mask=mask, max_new_tokens=9)[0]
    for number, part in enumerate(cache.split()):
        part.save(tmp_path, name=f"sequence-{number}")

    loaded = HybridCache.load(tmp_path, model, name="sequence-1")
    assert out[1, 7:-1].tolist() == loaded.tokens


def test_states_of_another_model_are_refused():
    model = zoo.build("lfm2")
    cache = HybridCache(model)
    modes.call(model, cache, zoo.text(5))
    states = cache.states()
    store = HybridCache(model).made_store(torch.float32, "cpu")
    first = next(iter(states))
    for wrong in (
        {},
        {name: states[name] for name in states if not name.startswith("layers.0.")},
        states | {"layers.0.conv": states[first]},
        states | {"layers.0.conv.1": states[first]},
        states | {"layers.2.conv.0": states[first]},
    ):
        empty = HybridCache(model)
        with pytest.raises(PackMismatch, match="states"):
            empty.adopt(store.restore(cache.session.snapshot()), wrong)

        assert 0 == empty.seen


# prompts


def a_prompt(length, seed=0):
    return zoo.text(length, seed=seed)


def cold(model, ids, count):
    """The canonical schedule without a store: whole chunks, the rest at once."""
    stock = modes.stock(model)
    stop = (ids.shape[1] - 1) // 256 * 256
    modes.calls(model, stock, ids, [256] * (stop // 256))
    mask = torch.ones_like(ids)
    return modes.generate(model, stock, ids, max_new_tokens=count, attention_mask=mask)


@pytest.mark.parametrize("name", zoo.among("muse_glimmer", "lfm2", "lfm3"))
@pytest.mark.parametrize("length", [5, 256, 257, 400])
def test_a_prompt_read_ahead_gives_what_a_cold_run_on_the_schedule_gives(name, length, tmp_path):
    model = zoo.build(name)
    ids = a_prompt(length)
    expected = cold(model, ids, 12)
    for number in range(2):
        cache = HybridCache.for_prompt(model, ids, tmp_path)
        reused = (length - 1) // 256 * 256 if number else 0

        assert reused == cache.origin.tokens
        mask = torch.ones_like(ids)
        found = modes.generate(model, cache, ids, max_new_tokens=12, attention_mask=mask)
        assert equal(expected, found)


@pytest.mark.parametrize("name", zoo.among("muse_glimmer", "lfm2", "lfm3"))
def test_a_conversations_next_prompt_does_not_read_its_history_again(name, tmp_path):
    model = zoo.build(name)
    undisturbed = HybridCache(model)
    ids = a_prompt(300)
    for turn in range(4):
        cache = HybridCache.for_prompt(model, ids, tmp_path)
        mask = torch.ones_like(ids)
        found = modes.generate(model, cache, ids, max_new_tokens=9, attention_mask=mask)
        cache.publish()
        if turn == 0:
            modes.calls(model, undisturbed, ids, [256])
        expected = modes.generate(model, undisturbed, ids, max_new_tokens=9, attention_mask=mask)

        assert equal(expected, found)
        # all but what was said since: the token that was chosen and not read, and the new words
        assert (0 if turn == 0 else ids.shape[1] - 12) == cache.origin.tokens
        ids = torch.cat([found[0], a_prompt(11, seed=turn + 1)], dim=1)


def test_a_prompts_own_end_is_a_cut_too(tmp_path):
    model = zoo.build("muse_glimmer")
    ids = a_prompt(300)
    mask = torch.ones_like(ids)
    cache = HybridCache.for_prompt(model, ids, tmp_path)
    modes.generate(model, cache, ids, max_new_tokens=9, attention_mask=mask)

    assert [300, 308] == cache.publish()
    assert [] == cache.publish()
    other = torch.cat([ids, a_prompt(20, seed=4)], dim=1)
    assert 300 == HybridCache.for_prompt(model, other, tmp_path).origin.tokens
    strict = HybridCache.for_prompt(model, other, tmp_path, strict=True)
    assert 256 == strict.origin.tokens
    assert "canonical" in strict.origin.reason


def test_another_tenant_finds_nothing(tmp_path):
    model = zoo.build("muse_glimmer")
    ids = a_prompt(300)
    HybridCache.for_prompt(model, ids, tmp_path, salt=b"one")

    assert 0 == HybridCache.for_prompt(model, ids, tmp_path, salt=b"two").origin.tokens
    assert 256 == HybridCache.for_prompt(model, ids, tmp_path, salt=b"one").origin.tokens


def test_a_cut_needs_a_root_and_tokens(tmp_path):
    model = zoo.build("cohere2")
    with pytest.raises(ArgumentError, match="one of for_prompt"):
        HybridCache(model).publish()
    with pytest.raises(ArgumentError, match="at least one"):
        HybridCache.for_prompt(model, [], tmp_path)
    cache = HybridCache.for_prompt(model, [5], tmp_path)
    with pytest.raises(ArgumentError, match="tokens that are known"):
        cache.publish()
