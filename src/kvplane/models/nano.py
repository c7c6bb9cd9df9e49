"""glimmer-nano: a Muse Glimmer of 5.9 million parameters that writes documentation, byte by byte.

Its tokens are bytes: id 0 to 255 is that byte, and three more mark a beginning, an end and padding.
There is no tokenizer to load. Where the weights came from is in docs/model-card.md.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    import torch
    from transformers import MuseGlimmerForConditionalGeneration

BOS: Final = 256
EOS: Final = 257
_NUM_BYTES: Final = 256


def nano_path() -> Path:
    """The folder with the model's weights and configuration, as `from_pretrained` takes it."""
    return Path(__file__).parent / "glimmer_nano"


def heldout_text() -> str:
    """287,379 bytes of documentation (UTF-8) that the model never saw, fourteen files in a row."""
    return (nano_path() / "heldout.txt").read_bytes().decode()


def encode(text: str | bytes) -> list[int]:
    """The ids of a text's UTF-8 bytes, or of bytes as they are; no beginning or end is added.

    In training each document began with `BOS`; `[BOS, *encode(text)]` begins one.
    """
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogateescape")
    return list(text)


def decode(
    ids: Iterable[int], *, errors: Literal["surrogateescape", "replace"] = "surrogateescape"
) -> str:
    """The text of ids, without those that stand for no byte.

    Args:
        ids: Token ids; a tensor's `.tolist()`.
        errors: What becomes of bytes that are not UTF-8. The default loses nothing, `encode` gives
            them back, but such a text may not print; "replace" always prints.
    """
    return bytes(token for token in ids if token < _NUM_BYTES).decode("utf-8", errors)


def load_nano(
    *, dtype: "torch.dtype | None" = None, device: "torch.device | str" = "cpu"
) -> "MuseGlimmerForConditionalGeneration":
    """The model in eval mode, ready for `generate(input_ids)`. Nothing is downloaded.

    Args:
        dtype: What the weights, stored as f16, are converted to; None is f32.
        device: Where they go.
    """
    import torch  # noqa: PLC0415 (seconds to import, and only needed here)
    from transformers import MuseGlimmerForConditionalGeneration  # noqa: PLC0415

    with _no_progress_bar():
        model: MuseGlimmerForConditionalGeneration = (
            MuseGlimmerForConditionalGeneration.from_pretrained(
                nano_path(), dtype=dtype or torch.float32, local_files_only=True
            )
        )
    # transformers wraps `to` in a way that type checkers cannot follow
    torch.nn.Module.to(model, torch.device(device))
    model.train(mode=False)
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading takes a tenth of a second: a bar would only scatter a caller's own output."""
    from transformers.utils import logging  # noqa: PLC0415

    shown = logging.is_progress_bar_enabled()
    if shown:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
