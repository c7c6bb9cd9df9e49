"""The training loop of glimmer-nano: seeded, bounded by the clock, its curve written as JSON.

One step reads 98,304 bytes, as 48 windows of 2,048 or, every fourth step, as 6 of 16,384: the
full layers have no positions and must have seen long contexts to work in them.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MuseGlimmerForConditionalGeneration

import nano_corpus
import nano_network

# what a byte costs a model that has learned nothing
UNTRAINED_BITS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides a run, beside the corpus.

    `steps` decide the schedule unless `minutes` end sooner; the schedule is then walked by the
    clock, so that a run always ends at its last learning rate.
    """

    size: str = "nano"
    seed: int = 20
    steps: int = 7_000
    minutes: float = 3.6
    batch: int = 48
    window: int = 2_048
    long_window: int = 16_384
    long_every: int = 4
    learning_rate: float = 2e-3
    final_share: float = 0.01
    warmup_steps: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.1
    clip_norm: float = 1.0
    validate_every: int = 250
    log_every: int = 25
    compiled: bool = True
    blocked: bool = True
    device: str = "cuda"


def train(recipe: Recipe, corpus: Path, out: Path) -> None:
    """Train, and keep the weights of the best validation in `out`, as f16.

    Writes `model.safetensors`, `config.json`, `generation_config.json` and `training.json` at each
    improvement, so that a run that is cut short leaves its best.
    """
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    # its masked kernels differ most between versions
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    model = _model(recipe)
    optimizer = _optimizer(model, recipe)
    windows = _windows(recipe, _stream(corpus, "train").to(recipe.device))
    validation = _validation_windows(recipe, _stream(corpus, "validation").to(recipe.device))
    record = _Record(recipe, model, corpus, out)
    # compiling happens in the first steps and is not the schedule's time
    clock_from = time.monotonic()
    for step, ids in enumerate(windows):
        if step == 2 * recipe.long_every:
            clock_from = time.monotonic()
        elapsed = (time.monotonic() - clock_from) / (60 * recipe.minutes)
        progress = max(step / recipe.steps, elapsed)
        if step and (progress >= 1 or step % recipe.validate_every == 0):
            bits = _validate(model, validation, recipe)
            record.note_validation(step, bits, by_clock=elapsed >= 1)
        if progress >= 1:
            break
        rate = recipe.learning_rate * _share(step, progress, recipe)
        loss = _train_step(model, optimizer, ids, rate, recipe)
        if step % recipe.log_every == 0:
            record.note_step(step, float(loss) / math.log(2), rate)


class _Record:
    """What `training.json` will say, and the weights of the best validation so far."""

    def __init__(
        self,
        recipe: Recipe,
        model: MuseGlimmerForConditionalGeneration,
        corpus: Path,
        out: Path,
    ) -> None:
        self._recipe = recipe
        self._model = model
        self._out = out
        self._started = time.monotonic()
        self._best = UNTRAINED_BITS
        manifest = json.loads((corpus / "manifest.json").read_text())
        self._json: dict[str, Any] = {
            "recipe": asdict(recipe),
            "parameters": sum(p.numel() for p in model.parameters()),
            "corpus_sha256": manifest["sha256"],
            "corpus_nbytes": manifest["nbytes"],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if recipe.device == "cuda" else "CPU",
            "train": [],
            "validation": [],
        }

    def note_step(self, step: int, bits: float, rate: float) -> None:
        """Add a point of the training curve."""
        entry = {"step": step, "bits_per_byte": round(bits, 5), "learning_rate": rate}
        self._json["train"].append(entry)
        print(f"step {step:6d} {self._seconds():7.1f} s train {bits:.4f}", flush=True)

    def note_validation(self, step: int, bits: float, *, by_clock: bool) -> None:
        """Add a point of the validation curve, keep the weights if it is the best, and write.

        Raises:
            ArithmeticError: The model knows no more than at its start, or is not a number.
        """
        if not bits < UNTRAINED_BITS:
            raise ArithmeticError(f"validation costs {bits} bits per byte after {step} steps")
        self._json["validation"].append({"step": step, "bits_per_byte": round(bits, 5)})
        self._json |= {"steps": step, "seconds": self._seconds(), "bounded_by_the_clock": by_clock}
        print(f"step {step:6d} {self._seconds():7.1f} s validation {bits:.4f}", flush=True)
        if bits < self._best:
            self._best, self._json["kept_step"] = bits, step
            _save(self._model, self._recipe, self._out)
        (self._out / "training.json").write_text(json.dumps(self._json, indent=1) + "\n")

    def _seconds(self) -> float:
        return round(time.monotonic() - self._started, 1)


def _model(recipe: Recipe) -> MuseGlimmerForConditionalGeneration:
    config = nano_network.configuration(size=recipe.size)
    model = nano_network.build(config, dropout=recipe.dropout)
    nn.Module.to(model, recipe.device)
    if recipe.blocked:
        nano_network.use_blocked_attention(model)
    if recipe.compiled:
        _compile(model)
    return model


def _share(step: int, progress: float, recipe: Recipe) -> float:
    """What part of the peak learning rate this step has: a linear warm-up, then a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    decayed = recipe.final_share + (1 - recipe.final_share) * cosine
    return decayed * min(1.0, (step + 1) / recipe.warmup_steps)


def _train_step(
    model: MuseGlimmerForConditionalGeneration,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    rate: float,
    recipe: Recipe,
) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = rate
    model.train()
    with torch.autocast(recipe.device, dtype=torch.bfloat16):
        loss = nano_network.byte_losses(model, ids).mean()
    torch.autograd.backward(loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, recipe.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@torch.no_grad()
def _validate(
    model: MuseGlimmerForConditionalGeneration, windows: list[Tensor], recipe: Recipe
) -> float:
    model.train(mode=False)
    with torch.autocast(recipe.device, dtype=torch.bfloat16):
        losses = [nano_network.byte_losses(model, ids).mean() for ids in windows]
    return float(torch.stack(losses).mean()) / math.log(2)


def _save(model: MuseGlimmerForConditionalGeneration, recipe: Recipe, out: Path) -> None:
    """Write the weights as f16 through a copy, so that training goes on in f32."""
    copy = nano_network.build(nano_network.configuration(size=recipe.size), dropout=0.0)
    copy.load_state_dict(model.state_dict())
    nn.Module.half(copy).save_pretrained(out)


def _compile(model: MuseGlimmerForConditionalGeneration) -> None:
    # layer by layer: two kinds of layer are two small graphs, not one of eight layers
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001
    for layer in model.model.language_model.layers:
        layer.compile(dynamic=False)
    nano_network._head_losses = torch.compile(  # noqa: SLF001
        nano_network._head_losses,  # noqa: SLF001
        dynamic=False,
    )


def _optimizer(model: MuseGlimmerForConditionalGeneration, recipe: Recipe) -> torch.optim.Optimizer:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trained.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in trained.items() if p.ndim != 2 or "embed" in name]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = recipe.device == "cuda"
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=fused)


def _stream(corpus: Path, split: str) -> Tensor:
    """One split as token ids, each document between its own bos and eos."""
    ids: list[Tensor] = []
    for _, text in nano_corpus.documents_of(corpus, split):
        ids.append(torch.tensor([nano_network.BOS], dtype=torch.int16))
        ids.append(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16))
        ids.append(torch.tensor([nano_network.EOS], dtype=torch.int16))
    return torch.cat(ids)


def _windows(recipe: Recipe, stream: Tensor) -> Iterator[Tensor]:
    """Windows at random places, one token longer than they are wide, without end."""
    generator = torch.Generator().manual_seed(recipe.seed)
    step = 0
    while True:
        step += 1
        wide = recipe.long_every and step % recipe.long_every == 0
        width = recipe.long_window if wide else recipe.window
        count = max(1, recipe.batch * recipe.window // width)
        first = torch.randint(len(stream) - width, (count,), generator=generator)
        places = first.to(stream.device)[:, None] + torch.arange(width + 1, device=stream.device)
        yield stream[places].long()


def _validation_windows(recipe: Recipe, stream: Tensor) -> list[Tensor]:
    """The validation text from its start, in whole batches of the training's shape."""
    width = recipe.window
    count = (len(stream) - 1) // width
    first = torch.arange(count, device=stream.device)[:, None] * width
    rows = stream[first + torch.arange(width + 1, device=stream.device)].long()
    whole = count // recipe.batch * recipe.batch
    return list(torch.split(rows[:whole], recipe.batch))
