"""The making of the shipped model, at sizes that take seconds."""

import json
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(autouse=True)
def _tools_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


@pytest.fixture
def corpus(tmp_path):
    from nano_corpus import _sha256

    text = b"The quick brown fox jumps over the lazy dog.\n" * 40
    entries = [
        {"name": split, "split": split, "first": at * len(text), "stop": (at + 1) * len(text)}
        for at, split in enumerate(("train", "validation", "heldout"))
    ]
    manifest = {"sha256": _sha256(text * 3), "nbytes": {}, "documents": entries}
    (tmp_path / "corpus.bin").write_bytes(text * 3)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_blocks_attend_as_the_masks_of_transformers_do():
    import nano_network

    torch.manual_seed(7)
    model = nano_network.build(nano_network.configuration(size="tiny"), dropout=0.0).eval()
    ids = torch.randint(256, (2, 32 * 7 + 1))
    with torch.no_grad():
        for parameter in model.model.language_model.layers.parameters():
            # at its initial scale attention is nearly flat and a wrong mask would hardly show
            parameter.mul_(8)
        logits = model(input_ids=ids[:, :-1]).logits
        masked = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        nano_network.use_blocked_attention(model)
        blocked = nano_network.byte_losses(model, ids)

    # two orders of summation in f32
    torch.testing.assert_close(blocked, masked, atol=1e-3, rtol=1e-4)


def test_a_few_steps_lower_the_loss_and_leave_a_model_that_loads_and_is_scored(corpus, tmp_path):
    from transformers import MuseGlimmerForConditionalGeneration

    from nano_scores import bits_of
    from nano_training import Recipe, train

    out = tmp_path / "out"
    out.mkdir()
    recipe = Recipe(
        size="tiny",
        steps=30,
        minutes=5,
        batch=2,
        window=128,
        long_window=256,
        warmup_steps=5,
        validate_every=15,
        compiled=False,
        device="cpu",
    )
    train(recipe, corpus, out)
    model = MuseGlimmerForConditionalGeneration.from_pretrained(out, dtype=torch.float32)

    run = json.loads((out / "training.json").read_text())
    assert [15, 30] == [point["step"] for point in run["validation"]]
    assert 30 == run["kept_step"]
    assert run["validation"][1]["bits_per_byte"] < run["validation"][0]["bits_per_byte"]
    assert not run["bounded_by_the_clock"]
    text = b"The quick brown fox jumps over the lazy dog.\n" * 60
    assert run["validation"][1]["bits_per_byte"] == pytest.approx(
        bits_of(model, text) / len(text), rel=0.1
    )


def test_an_altered_corpus_is_refused(corpus):
    from nano_corpus import documents_of

    content = (corpus / "corpus.bin").read_bytes()
    (corpus / "corpus.bin").write_bytes(content[:-1] + b"!")

    with pytest.raises(ValueError, match="is not the file its manifest describes"):
        documents_of(corpus, "train")


def test_repeated_bytes_are_dropped_before_the_split_which_knows_names_only():
    from nano_corpus import _split

    files = [(f"library/{number}.rst.txt", b"%d " % number * 4_000) for number in range(90)]
    again = [(f"elsewhere/{name}", text) for name, text in files[:7]]

    documents, repeats = _split(files + again)

    assert 7 == repeats
    assert 90 == len(documents)
    assert {"train", "validation", "heldout"} == {document.split for document in documents}
    shorter = [(name, text[:-1]) for name, text in files]
    assert [document.split for document in documents] == [
        document.split for document in _split(shorter)[0]
    ]


def test_long_paragraphs_of_heldout_files_leave_the_training_text():
    from nano_corpus import Document, _without_shared_paragraphs

    shared = b"A paragraph of some length that two files have word for word, " * 2
    kept = Document(name="a", source="s", split="heldout", text=b"One.\n\n" + shared)
    wrapped = shared.replace(b" ", b"\n")
    trained = Document(name="b", source="s", split="train", text=wrapped + b"\n" + b"One.\n")

    documents, nbytes_removed = _without_shared_paragraphs([kept, trained])

    assert [kept.text, b"One.\n"] == [document.text for document in documents]
    assert len(wrapped) + 1 == nbytes_removed
