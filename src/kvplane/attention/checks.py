"""What attention refuses before it reads a row."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, TensorMismatch


def checked_chunk(key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The rows of a call that are not stored yet, or None: ArgumentError for half of them."""
    if key is not None and value is not None:
        return key, value
    if key is not None or value is not None:
        raise ArgumentError(argument="value", expected="with key", got="one without the other")
    return None


def check_positions(
    runs: Sequence[range],
    chunk: tuple[Tensor, Tensor] | None,
    *,
    first_key: int,
    first_query: int,
    num_tokens: int,
) -> None:
    """Refuse queries of which one has no key of its own position: ArgumentError."""
    held = sum(len(run) for run in runs) + (0 if chunk is None else chunk[0].shape[1])
    stop = first_key + held
    if not 0 <= first_key <= first_query or first_query + num_tokens > stop:
        raise ArgumentError(
            argument="first_query",
            expected=f"queries within [{first_key}, {stop})",
            got=(first_query, first_query + num_tokens),
        )


def check_rule(
    num_heads: int,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Refuse a rule that no softmax attention has.

    Raises:
        ArgumentError: a window below 1, a scale that is not finite, a softcap that is not above 0.
        TensorMismatch: sinks that are not one a head.
    """
    if window is not None and window < 1:
        raise ArgumentError(argument="window", expected="at least 1, or None", got=window)
    if not math.isfinite(scale):
        raise ArgumentError(argument="scale", expected="a finite number", got=scale)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ArgumentError(argument="softcap", expected="above 0, or None", got=softcap)
    if sinks is not None and sinks.shape != (num_heads,):
        raise TensorMismatch(
            layer=None, what="sinks", expected=(num_heads,), got=tuple(sinks.shape)
        )


def check_precision(device: torch.device) -> None:
    """Refuse while float32 products are set to be computed in fewer digits.

    Raises:
        ArgumentError: `torch.set_float32_matmul_precision`, or what stands behind it, allows
            another format on this device: outputs would change silently.
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    chosen = backend.matmul.fp32_precision
    if chosen == "bf16" or (chosen == "tf32" and _has_tf32(device)):
        raise ArgumentError(
            argument="torch.set_float32_matmul_precision", expected="'highest'", got=chosen
        )


def _has_tf32(device: torch.device) -> bool:
    # on a CPU PyTorch takes it to these instructions, and ignores it where there are none
    return device.type == "cuda" or bool(torch.cpu.get_capabilities().get("amx_fp16"))
