"""Whether memory has room for a session, by its plan and before anything is loaded."""

from pathlib import Path
from typing import Any

from kvplane.cli.output import human
from kvplane.errors import MemoryUnavailable


def check_memory(
    config: Any,  # noqa: ANN401 - any transformers config
    *,
    dtype: str | None = None,
    device: str = "cpu",
    max_context: int | None = None,
) -> None:
    """Refuse what memory cannot hold.

    Args:
        config: the model's.
        dtype: of the rows; None takes the config's.
        device: where they will lie.
        max_context: None takes the config's.

    Raises:
        MemoryUnavailable: rings, full planes at max_context and scratch, against what is free.
    """
    from kvplane.footprint import footprint  # noqa: PLC0415 - only commands that load a model
    from kvplane.geometry import ModelGeometry  # noqa: PLC0415
    from kvplane.integrations.transformers import kinds, options  # noqa: PLC0415
    from kvplane.integrations.transformers.conversation import SLACK  # noqa: PLC0415
    from kvplane.schedule import CHUNK  # noqa: PLC0415

    text = kinds.text_config(config)
    geometry = ModelGeometry.from_config(text, dtype=dtype)
    context = options.context_of(text) if max_context is None else max_context
    plan = footprint(geometry, context=context, step=CHUNK, slack=SLACK, gather=True)
    needed = plan.session.reserved + plan.session.scratch
    free = available_nbytes(device)
    if free is not None and needed > free:
        raise MemoryUnavailable(
            f"a session of {context:,} tokens takes {human(needed)}, {human(free)} are free: "
            "choose a smaller --max-context"
        )


def available_nbytes(device: str = "cpu") -> int | None:
    """Bytes that can still be had on a device; None where nobody says."""
    if device.startswith("cuda"):
        import torch  # noqa: PLC0415 - seconds

        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
