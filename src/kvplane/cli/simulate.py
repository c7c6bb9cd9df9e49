"""`kvplane simulate`: when a handoff beats reading the prompt where it is answered."""

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from kvplane.cli.geometries import geometry_of
from kvplane.cli.output import console, print_table
from kvplane.errors import ArgumentError

if TYPE_CHECKING:
    from kvplane.transfer.simulate import Timeline, Wire

PROMPTS = "8192,32768,130815"
LINKS = "10,25,100,200"
MS = 1e-3


def simulate(
    model: str = "muse-glimmer-30b",
    /,
    *,
    prompt: str = PROMPTS,
    bandwidth: str = LINKS,
    prefill_rate: float = 10_000.0,
    local_rate: float = 2_000.0,
    doubling: float | None = None,
    latency_ms: float = 0.1,
    sleep_after_ms: float | None = None,
    wake_ms: float = 5.0,
    cut: int = 0,
    dtype: str | None = None,
    plot: Path | None = None,
) -> None:
    """Say when a handoff has its first token, by link and schedule, against no handoff.

    Nothing is measured: the rates are what you say they are.

    Example: kvplane simulate muse-glimmer-30b --prompt 130815 --bandwidth 10,100

    Args:
        model: A preset, a config.json or its folder, or a Hugging Face id.
        prompt: Tokens; several lengths with commas.
        bandwidth: Of the links, Gb/s, with commas.
        prefill_rate: Tokens a second of the machine that sends.
        local_rate: Tokens a second of the machine that answers, reading by itself.
        doubling: Position at which a token takes twice as long to read; never unless given.
        latency_ms: Of the links.
        sleep_after_ms: Idle time after which a link sleeps; never unless given.
        wake_ms: What a link loses of a burst when it slept.
        cut: Tokens that both machines hold already.
        dtype: Of the rows; the model's own unless given.
        plot: A picture of both schedules, of the first prompt on the first link (png, svg, pdf).
    """
    from kvplane.transfer.schedule import NAMES  # noqa: PLC0415 - torch, seconds
    from kvplane.transfer.simulate import (  # noqa: PLC0415
        GIGABIT,
        Reader,
        local_s,
        overlap,
        schedule_of,
        simulated,
        smallest_link,
    )

    geometry = geometry_of(model, dtype=dtype)
    sender = Reader(tokens_per_s=prefill_rate, doubling=doubling)
    answering = Reader(tokens_per_s=local_rate, doubling=doubling)
    rates = _numbers("bandwidth", bandwidth)
    wires = [_wire(gigabits, latency_ms, sleep_after_ms, wake_ms) for gigabits in rates]
    prompts = [int(number) for number in _numbers("prompt", prompt)]
    decode_s = 1 / local_rate
    out = console()
    rows: list[list[str]] = []
    least: list[list[str]] = []
    drawn: list[Timeline] = []
    for num_tokens in prompts:
        schedules = [schedule_of(geometry, num_tokens, name=name, cut=cut) for name in NAMES]
        alone = local_s(answering, num_tokens, cut=cut)
        for wire in wires:
            lines = [simulated(each, sender, wire, decode_s=decode_s) for each in schedules]
            drawn = drawn or lines
            rows.append(
                [
                    f"{num_tokens:,} tokens, {wire.bytes_per_s / GIGABIT:g} Gb/s",
                    *(f"{line.first_token_s:.3f}" for line in lines),
                    f"{alone:.3f}",
                    *(f"{share:.0%}" for share in overlap(lines)),
                    *(f"{line.num_lost}" for line in lines),
                ]
            )
        found = [
            smallest_link(
                geometry,
                num_tokens,
                prefill=sender,
                local=answering,
                wire=wires[0],
                name=name,
                cut=cut,
                decode_s=decode_s,
            )
            for name in NAMES
        ]
        least.append(
            [
                f"{num_tokens:,} tokens",
                f"{schedules[0].payload.total:,}",
                *("none" if rate is None else f"{rate / GIGABIT:.3g}" for rate in found),
            ]
        )
    title = (
        "seconds to the first token, as if a prompt were read at "
        f"{prefill_rate:,.0f} tokens/s there and {local_rate:,.0f} here"
    )
    head = ["", *NAMES, "no handoff", *(f"{name}: sent while reading" for name in NAMES)]
    print_table(out, title, [*head, *(f"{name}: bursts lost" for name in NAMES)], rows)
    title = "the slowest link, in Gb/s, that beats no handoff"
    print_table(out, title, ["", "bytes", *NAMES], least)
    if plot is not None:
        from kvplane.cli.simulate_plot import draw_timelines  # noqa: PLC0415

        alone = local_s(answering, prompts[0], cut=cut)
        draw_timelines(plot, drawn, alone_s=alone)


def _numbers(argument: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < inf for number in numbers):
        raise ArgumentError(argument=argument, expected='numbers, as in "10,100"', got=text)
    return numbers


def _wire(
    gigabits: float, latency_ms: float, sleep_after_ms: float | None, wake_ms: float
) -> "Wire":
    from kvplane.transfer.simulate import GIGABIT, Wire  # noqa: PLC0415

    return Wire(
        bytes_per_s=gigabits * GIGABIT,
        latency_s=latency_ms * MS,
        sleep_after_s=None if sleep_after_ms is None else sleep_after_ms * MS,
        wake_s=wake_ms * MS,
    )
