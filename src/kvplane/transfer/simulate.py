"""When a handoff beats reading the prompt here: discrete events, no machine and no network.

    compute   the prefill machine reads chunk by chunk, or layer by layer through the whole prompt
    link      one segment at a time, in the schedule's order, each once its rows are final
    sleep     a link that was idle for a while loses what is sent while it wakes up
              (Energy-Efficient Ethernet, the chapter's section 15.8): that burst goes out again
              after a timeout

Times are seconds from the first token's reading; rates are given by whoever asks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvplane.errors import ArgumentError
from kvplane.geometry import ModelGeometry
from kvplane.schedule import canonical
from kvplane.transfer.schedule import (
    CHAPTER,
    STREAMED,
    STREAMED_CHUNK,
    Schedule,
    Segment,
)

GIGABIT = 125_000_000
_HALVINGS = 40
_LEAST, _MOST = 1e3, 1e15


class Order(Enum):
    """In which order a prompt is computed."""

    CHUNKS = "chunk by chunk"
    LAYERS = "layer by layer"


# the chapter holds full layers back until the last layer is done, and reads layer by layer
COMPUTED = {STREAMED: Order.CHUNKS, CHAPTER: Order.LAYERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How fast a machine reads a prompt.

    Args:
        tokens_per_s: at position 0.
        doubling: the position at which a token costs twice that; None: it never does.
        chunk: tokens of a call.

    Raises:
        ArgumentError: a number is not above 0.
    """

    tokens_per_s: float
    doubling: float | None = None
    chunk: int = 256

    def __post_init__(self) -> None:
        _check("tokens_per_s", self.tokens_per_s)
        _check("chunk", self.chunk)
        if self.doubling is not None:
            _check("doubling", self.doubling)

    def seconds(self, first: int, stop: int) -> float:
        """To read positions [first, stop)."""
        middle = (first + stop) / 2
        grown = 1.0 if self.doubling is None else 1.0 + middle / self.doubling
        return (stop - first) / self.tokens_per_s * grown


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A link.

    Args:
        bytes_per_s: that arrive, verified.
        latency_s: from one end to the other.
        sleep_after_s: idle time after which it sleeps; None: it never does.
        wake_s: in which what is sent is lost.
        retry_s: after which a burst that was lost goes out again.

    Raises:
        ArgumentError: a rate that is not above 0, or a time below 0.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    sleep_after_s: float | None = None
    wake_s: float = 0.0
    retry_s: float = 0.2

    def __post_init__(self) -> None:
        _check("bytes_per_s", self.bytes_per_s)
        times = (self.latency_s, self.wake_s, self.retry_s, self.sleep_after_s or 0.0)
        if min(times) < 0:
            raise ArgumentError(argument="wire", expected="times of at least 0", got=min(times))

    def asleep(self, idle_s: float) -> bool:
        """Whether it sleeps after so long."""
        return self.sleep_after_s is not None and idle_s > self.sleep_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One segment on its way.

    Args:
        segment: which.
        final_s: when its rows were final.
        begin_s: when it went out, for the last time.
        end_s: when its last byte left.
        lost: whether it had gone out before, into a link that slept.
    """

    segment: Segment
    final_s: float
    begin_s: float
    end_s: float
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happened when.

    Args:
        schedule: that was sent.
        read_s: when the prompt was read but for its last token.
        sendings: in their order.
        first_token_s: when the receiver has run the last prompt token.
    """

    schedule: Schedule
    read_s: float
    sendings: tuple[Sending, ...]
    first_token_s: float

    @property
    def num_lost(self) -> int:
        """Bursts that went into a link that slept."""
        return sum(sending.lost for sending in self.sendings)

    @property
    def busy_s(self) -> float:
        """How long the link carried rows."""
        return sum(sending.end_s - sending.begin_s for sending in self.sendings)


def simulated(schedule: Schedule, reader: Reader, wire: Wire, *, decode_s: float = 0.0) -> Timeline:
    """A handoff as it would go.

    Args:
        schedule: of the segments.
        reader: the prefill machine; it holds [0, cut) as the receiver does.
        wire: between the two.
        decode_s: that the receiver takes for the last prompt token.
    """
    return _on(wire, schedule, _finals(schedule, reader), decode_s)


class _Finals(NamedTuple):
    """When a prompt was read, and when each segment's rows were final, in the schedule's order."""

    read_s: float
    segments: list[float]


def _on(wire: Wire, schedule: Schedule, finals: _Finals, decode_s: float) -> Timeline:
    free_s = 0.0
    sendings = []
    for segment, final_s in zip(schedule.segments, finals.segments, strict=True):
        begin_s = max(free_s, final_s)
        lost = wire.asleep(begin_s - free_s)
        if lost:
            begin_s += wire.wake_s + wire.retry_s
        end_s = begin_s + segment.nbytes / wire.bytes_per_s
        sendings.append(
            Sending(segment=segment, final_s=final_s, begin_s=begin_s, end_s=end_s, lost=lost)
        )
        free_s = end_s
    arrived_s = max(free_s, finals.read_s) + wire.latency_s
    return Timeline(
        schedule=schedule,
        read_s=finals.read_s,
        sendings=tuple(sendings),
        first_token_s=arrived_s + decode_s,
    )


def _finals(schedule: Schedule, reader: Reader) -> _Finals:
    num_layers = len(schedule.geometry.layers)
    calls = list(canonical(schedule.cut, schedule.position, chunk=reader.chunk))
    costs = [reader.seconds(call.start, call.stop) / num_layers for call in calls]
    ends = {}
    stops = [call.stop for call in calls]
    done_s = 0.0
    if COMPUTED[schedule.name] is Order.LAYERS:
        pairs = [(call, layer) for layer in range(num_layers) for call in range(len(calls))]
    else:
        pairs = [(call, layer) for call in range(len(calls)) for layer in range(num_layers)]
    for call, layer in pairs:
        done_s += costs[call]
        ends[call, layer] = done_s
    finals = []
    for segment in schedule.segments:
        if schedule.name == CHAPTER and not segment.group.is_sliding:
            # held back until the last layer is done
            finals.append(done_s)
        else:
            call = bisect_left(stops, segment.stop)
            finals.append(max(ends[call, layer] for layer in segment.layers))
    return _Finals(done_s, finals)


def local_s(reader: Reader, num_tokens: int, *, cut: int = 0) -> float:
    """When a machine that reads the whole prompt itself has its first token."""
    calls = canonical(cut, num_tokens, chunk=reader.chunk)
    return sum(reader.seconds(call.start, call.stop) for call in calls)


def smallest_link(
    geometry: ModelGeometry,
    num_tokens: int,
    *,
    prefill: Reader,
    local: Reader,
    wire: Wire,
    name: str = STREAMED,
    cut: int = 0,
    decode_s: float = 0.0,
) -> float | None:
    """Bytes a second from which on a handoff has its first token before local reading has.

    Args:
        geometry: the model's.
        num_tokens: of the prompt, its last token included.
        prefill: the machine that would send.
        local: the machine that would receive, reading by itself.
        wire: its rate is of no account.
        name: of the schedule.
        cut: both machines hold [0, cut) already.
        decode_s: as in `simulated`.

    Returns:
        None when no link is fast enough.
    """
    schedule = schedule_of(geometry, num_tokens, name=name, cut=cut)
    limit = local_s(local, num_tokens, cut=cut)
    finals = _finals(schedule, prefill)

    def wins(bytes_per_s: float) -> bool:
        made = Wire(
            bytes_per_s=bytes_per_s,
            latency_s=wire.latency_s,
            sleep_after_s=wire.sleep_after_s,
            wake_s=wire.wake_s,
            retry_s=wire.retry_s,
        )
        return _on(made, schedule, finals, decode_s).first_token_s <= limit

    slow, fast = _LEAST, _MOST
    if not wins(fast):
        return None
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (slow, middle) if wins(middle) else (middle, fast)
    return fast


def schedule_of(
    geometry: ModelGeometry,
    num_tokens: int,
    *,
    name: str = STREAMED,
    cut: int = 0,
    chunk: int = STREAMED_CHUNK,
) -> Schedule:
    """The schedule of a prompt whose last token the receiver runs: ArgumentError."""
    return Schedule(geometry=geometry, position=num_tokens - 1, cut=cut, name=name, chunk=chunk)


def overlap(timelines: Sequence[Timeline]) -> list[float]:
    """By timeline: the share of the rows that had left before the prompt was read."""
    shares = []
    for timeline in timelines:
        sent = sum(
            sending.segment.nbytes
            for sending in timeline.sendings
            if sending.end_s <= timeline.read_s
        )
        shares.append(sent / timeline.schedule.payload.total)
    return shares


def _check(argument: str, number: float) -> None:
    if not number > 0:
        raise ArgumentError(argument=argument, expected="above 0", got=number)
