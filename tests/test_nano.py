"""The shipped model: it loads offline, is what its card says, and writes words."""

import json
import math
import re
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplane.models import BOS, decode, encode, heldout_text, load_nano, nano_path

CARD = Path(__file__).parents[1] / "docs" / "model-card.md"


@pytest.fixture(scope="module")
def nano():
    return load_nano()


@pytest.fixture(scope="module")
def evaluation():
    return json.loads((nano_path() / "evaluation.json").read_text())


def test_it_loads_in_eval_mode_without_a_network_a_bar_or_a_draw_of_random_numbers(
    monkeypatch, capfd
):
    def refuse(*_):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    before = torch.get_rng_state()

    model = load_nano(dtype=torch.bfloat16)

    assert torch.equal(before, torch.get_rng_state())
    assert not model.training
    assert {torch.bfloat16} == {parameter.dtype for parameter in model.parameters()}
    assert ("", "") == tuple(capfd.readouterr())


def test_its_layers_are_three_sliding_with_rotary_then_one_full_without(nano):
    text = nano.config.text_config

    assert (["sliding_attention"] * 3 + ["full_attention"]) * 2 == text.layer_types
    assert ([10_000.0] * 3 + [0]) * 2 == text.layer_rope_theta
    assert (128, 2, 32) == (text.sliding_window, text.num_key_value_heads, text.head_dim)
    assert 20.0 == text.final_logit_softcapping


def test_its_cached_rows_have_the_shape_the_configuration_says(nano):
    ids = torch.tensor([encode("x" * 300)])
    with torch.no_grad():
        out = nano.model(input_ids=ids, use_cache=True)
    # transformers 5.17 has the older name
    cache = out["cache" if "cache" in out else "past_key_values"]

    assert 8 == len(cache.layers)
    assert (1, 2, 127, 32) == tuple(cache.layers[0].keys.shape)
    assert (1, 2, 300, 32) == tuple(cache.layers[3].keys.shape)


def test_it_is_small(nano):
    parameters = sum(parameter.numel() for parameter in nano.parameters())

    assert 5_911_872 == parameters
    assert 1_088 == sum(p.numel() for name, p in nano.named_parameters() if "vision" in name)
    assert (nano_path() / "model.safetensors").stat().st_size <= 12_000_000
    assert 287_379 == len(heldout_text().encode()) <= 300_000


def test_the_start_of_the_heldout_text_costs_the_bits_that_the_evaluation_says(nano, evaluation):
    nbytes = evaluation["slice"]["nbytes"]
    ids = torch.tensor([BOS, *encode(heldout_text())[:nbytes]])
    nats, scored = 0.0, 0
    with torch.no_grad():
        while scored < nbytes:
            # 2,048 bytes a window; each but the first gives 1,024 of them as context
            first = max(0, scored - 1_024)
            window = ids[first : first + 2_049]
            logits = nano(input_ids=window[None, :-1], use_cache=False).logits[0]
            losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
            nats += float(losses[scored - first :].double().sum())
            scored = first + len(losses)

    assert evaluation["slice"]["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / nbytes, abs=1e-4
    )
    assert evaluation["bits_per_byte"] <= 1.25


def test_what_it_writes_is_printable_and_made_of_words_of_documentation(nano):
    text = heldout_text()
    known = set(re.findall(r"[a-z]{2,}", text.lower()))
    start = text.index("This module provides")
    ids = torch.tensor([[BOS, *encode(text[start : start + 512])]])

    out = nano.generate(ids, max_new_tokens=240, do_sample=False)

    written = decode(out[0, ids.shape[1] :].tolist(), errors="replace")
    words = re.findall(r"[a-z]{2,}", written.lower())
    assert len(words) >= 25
    assert sum(word in known for word in words) >= 0.9 * len(words)
    assert all(character == "\n" or " " <= character <= "~" for character in written)


@given(st.binary(max_size=64))
def test_any_bytes_come_back_from_their_ids_and_from_their_text(data):
    assert list(data) == encode(data)
    assert encode(data) == encode(decode(encode(data)))


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=64))
def test_any_text_comes_back_and_special_ids_are_no_part_of_it(text):
    assert text == decode([BOS, *encode(text), 257, 258, 263])


def test_broken_bytes_can_be_decoded_for_printing():
    assert "a\ufffdb" == decode([97, 255, 98], errors="replace")


def test_the_card_says_what_the_run_wrote(evaluation):
    card = CARD.read_text(encoding="utf-8")
    run = json.loads((nano_path() / "training.json").read_text())

    assert f"**{evaluation['bits_per_byte']:.3f} bits per byte**" in card
    assert f"{evaluation['slice']['bits_per_byte']:.3f}" in card
    for entry in evaluation["files"]:
        row = f"| `{entry['name']}` | {entry['nbytes']:,} | {entry['bits_per_byte']:.3f} |"
        assert row in card
    for first_stop, bits in evaluation["by_position"].items():
        first, stop = map(int, first_stop.split("-"))
        assert f"| {first:,} to {stop:,} | {bits:.2f} |" in card
    assert f"{run['parameters']:,} parameters" in card
    assert f"{run['steps']:,} steps" in card
    assert f"step {run['kept_step']:,}" in card
    assert evaluation["samples"]["temperature_0.7"].rstrip() in card
