"""Timelines of handoffs as a picture; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvplane.errors import ArgumentError, ExtraMissing

if TYPE_CHECKING:
    from kvplane.transfer.simulate import Timeline

SLIDING, FULL, READING, LOST = "tab:orange", "tab:blue", "lightgrey", "tab:red"


def draw_timelines(path: Path, timelines: Sequence["Timeline"], *, alone_s: float) -> None:
    """When rows were on the link, by schedule, below when the prompt was read.

    Args:
        path: of the picture.
        timelines: one a schedule.
        alone_s: when there would be a first token without a handoff.

    Raises:
        ExtraMissing: matplotlib is not installed.
        ArgumentError: the file cannot be written, or its ending names no picture format.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
        from matplotlib.patches import Patch  # noqa: PLC0415
    except ImportError as error:
        raise ExtraMissing(package="matplotlib", extra="plot") from error
    figure = Figure(figsize=(9, 1.5 + 1.5 * len(timelines)), layout="constrained")
    axes = figure.add_subplot()
    marks = []
    for number, line in enumerate(timelines):
        above, below = 2.5 * number + 1, 2.5 * number
        axes.broken_barh([(0, line.read_s)], (above, 0.8), color=READING)
        for color, sliding in ((SLIDING, True), (FULL, False)):
            bars = [
                (each.begin_s, each.end_s - each.begin_s)
                for each in line.sendings
                if each.segment.group.is_sliding is sliding
            ]
            axes.broken_barh(bars, (below, 0.8), color=color)
        lost = [each.begin_s for each in line.sendings if each.lost]
        axes.plot(lost, [below + 0.4] * len(lost), "x", color=LOST)
        axes.plot([line.first_token_s] * 2, [below, above + 0.8], color="black")
        marks += [(above + 0.4, f"{line.schedule.name}: reading"), (below + 0.4, "on the link")]
    axes.axvline(alone_s, linestyle=":", color="grey")
    axes.set_yticks([place for place, _ in marks], [text for _, text in marks])
    axes.set(xlabel="seconds", title="black: first token; dotted: without a handoff")
    axes.legend(
        handles=[
            Patch(color=SLIDING, label="sliding layers"),
            Patch(color=FULL, label="full layers"),
            Patch(color=LOST, label="bursts lost"),
        ],
        loc="upper right",
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            argument="plot", expected="a picture file that can be written", got=f"{path}: {error}"
        ) from error
