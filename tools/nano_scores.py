"""What the saved glimmer-nano is worth: bits per byte on held-out files, and text it writes.

Everything is measured in f32 on the f16 weights as shipped, loaded as any user loads them, with
transformers' own attention. A byte's context is at most 2,048 bytes and, where its file has them,
at least 1,024.
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MuseGlimmerForConditionalGeneration

import nano_corpus
import nano_network

CONTEXT, STRIDE, BATCH = 2_048, 1_024, 8
SLICE_NBYTES = 16_384
LONG_CONTEXT = 32_768
BUCKETS = (0, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
PROMPT_NBYTES, SAMPLE_NBYTES = 1_024, 600


def evaluate(model_folder: Path, corpus: Path, *, device: str, documents: int | None) -> None:
    """Write `evaluation.json` and `heldout.txt` into `model_folder`.

    Args:
        model_folder: A folder that `train` wrote.
        corpus: A folder that `prepare` wrote.
        device: Where to run.
        documents: Score only the first few held-out files; None scores all.
    """
    torch.set_float32_matmul_precision("highest")
    model: MuseGlimmerForConditionalGeneration = (
        MuseGlimmerForConditionalGeneration.from_pretrained(
            model_folder, dtype=torch.float32, local_files_only=True
        )
    )
    nn.Module.to(model, device)
    files = nano_corpus.documents_of(corpus, "heldout")[:documents]
    text = b"".join(content for _, content in files)
    scored: list[dict[str, Any]] = []
    for name, content in files:
        bits = bits_of(model, content)
        scored.append({"name": name, "nbytes": len(content), "bits_per_byte": bits / len(content)})
    total = sum(entry["bits_per_byte"] * entry["nbytes"] for entry in scored)
    report: dict[str, Any] = {
        "bits_per_byte": total / len(text),
        "nbytes": len(text),
        "context": CONTEXT,
        "stride": STRIDE,
        "files": scored,
        "slice": {
            "nbytes": SLICE_NBYTES,
            "bits_per_byte": bits_of(model, text[:SLICE_NBYTES]) / SLICE_NBYTES,
        },
        "samples": _samples(model, files),
        "by_position": _by_position(model, text),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (model_folder / "heldout.txt").write_bytes(text)
    (model_folder / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("bits_per_byte", "by_position")}, indent=1))
    print(report["samples"]["greedy"])


@torch.no_grad()
def bits_of(model: MuseGlimmerForConditionalGeneration, text: bytes) -> float:
    """Bits the whole of `text` costs, each byte scored once and after a bos."""
    ids = torch.tensor([nano_network.BOS, *text], device=model.device)
    nats = 0.0
    firsts = list(range(0, max(len(text) - CONTEXT, 0) + STRIDE, STRIDE))
    # the last window is shorter, so it goes alone
    batches = [firsts[:-1][at : at + BATCH] for at in range(0, len(firsts) - 1, BATCH)]
    scored_until = 0
    for batch in [*batches, firsts[-1:]]:
        rows = torch.stack([ids[first : first + CONTEXT + 1] for first in batch])
        losses = _own_losses(model, rows)
        for first, row in zip(batch, losses, strict=True):
            nats += float(row[scored_until - first :].double().sum())
            scored_until = first + len(row)
    return nats / math.log(2)


def _own_losses(model: MuseGlimmerForConditionalGeneration, ids: Tensor) -> Tensor:
    """Nats per byte from the model's own logits, among bytes and special tokens alike."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


@torch.no_grad()
def _by_position(model: MuseGlimmerForConditionalGeneration, text: bytes) -> dict[str, float]:
    """Bits per byte by how far into one long window of joined files a byte stands."""
    nano_network.use_blocked_attention(model)
    width = min(LONG_CONTEXT, len(text) // 1_024 * 1_024)
    losses = []
    for first in range(0, len(text) - width + 1, width):
        ids = torch.tensor([[nano_network.BOS, *text[first : first + width]]], device=model.device)
        losses.append(nano_network.byte_losses(model, ids)[0])
    mean = torch.stack(losses).mean(dim=0) / math.log(2)
    edges = [edge for edge in BUCKETS if edge < width] + [width]
    return {f"{first}-{stop}": float(mean[first:stop].mean()) for first, stop in pairwise(edges)}


@torch.no_grad()
def _samples(
    model: MuseGlimmerForConditionalGeneration, files: list[tuple[str, bytes]]
) -> dict[str, str]:
    """What the model writes after the beginning of a held-out file."""
    name, content = max(files, key=lambda file: len(file[1]))
    prompt = content[:PROMPT_NBYTES]
    ids = torch.tensor([[nano_network.BOS, *prompt]], device=model.device)
    written = {"file": name, "prompt": prompt.decode("utf-8", "replace")}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "temperature_0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0},
    }
    for kind, arguments in kinds.items():
        torch.manual_seed(0)
        out = model.generate(ids, max_new_tokens=SAMPLE_NBYTES, **arguments)
        new = bytes(token for token in out[0, ids.shape[1] :].tolist() if token < 256)
        written[kind] = new.decode("utf-8", "replace")
    return written
