"""Pictures of plans; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from kvplane.errors import ArgumentError, ExtraMissing
from kvplane.footprint import Footprint
from kvplane.geometry import FULL, SLIDING
from kvplane.stock import dynamic_cache


def draw_footprint(path: Path, model: str, plans: Sequence[Footprint]) -> None:
    """Bytes of one session over context, by layer kind, and of a stock cache after its prompt.

    Raises:
        ExtraMissing: matplotlib is not installed.
        ArgumentError: the file cannot be written, or its ending names no picture format.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ExtraMissing(package="matplotlib", extra="plot") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    contexts = [now.context for now in plans]
    gib = 2**30
    for kind in (SLIDING, FULL):
        axes.plot(contexts, [now.kind(kind).reserved / gib for now in plans], "o-", label=kind)
    stock = [dynamic_cache(now.geometry, context=now.context).after_prompt / gib for now in plans]
    axes.plot(contexts, stock, ":", color="grey", label="DynamicCache after the prompt")
    axes.set(title=f"{model}: bytes of one session", xlabel="context, tokens", ylabel="GiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            argument="plot", expected="a picture file that can be written", got=f"{path}: {error}"
        ) from error
