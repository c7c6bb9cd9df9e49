"""Statistics of a piece, beside it: each channel's range, each token's norm, the largest norms.

They fit a chunk's header, so only pieces of at most 768 tokens and 512 channels can have them.
Readers that choose rows by these need not fetch the piece itself.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvplane.kvpack import limits
from kvplane.kvpack.wire import Reader, check_canonical, head, reject, u16, u32

MAGIC = "KVSSC1"
Half = npt.NDArray[np.float16]


class Sink(NamedTuple):
    """One of the tokens of the largest norms."""

    token: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Ranges `(minimum, maximum)` by channel, norms by token, and the largest norms."""

    ranges: tuple[tuple[float, float], ...]
    norms: tuple[float, ...]
    sinks: tuple[Sink, ...]

    @classmethod
    def of_rows(cls, rows: Half, *, num_sinks: int) -> Self:
        """Of float16 rows `[tokens, channels]`: KvpackRejected when they do not fit the format."""
        with np.errstate(over="ignore"):
            squares = np.square(rows.astype(np.float64)).sum(axis=1)
            norms = np.sqrt(squares.astype(np.float32)).astype(np.float16)
        sidecar = cls(
            ranges=tuple(zip(rows.min(axis=0).tolist(), rows.max(axis=0).tolist(), strict=True)),
            norms=tuple(norms.tolist()),
            sinks=_largest(norms.tolist(), num_sinks),
        )
        sidecar.check()
        return sidecar

    def encoded(self) -> bytes:
        """The KVSSC1 object."""
        self.check()
        data = b"".join(
            (
                head(MAGIC),
                u32(len(self.ranges)),
                _halves([value for pair in self.ranges for value in pair]),
                u32(len(self.norms)),
                _halves(self.norms),
                u16(len(self.sinks)),
                *(u32(sink.token) + _halves([sink.score]) + u16(0) for sink in self.sinks),
            )
        )
        if len(data) > limits.SIDECAR_NBYTES:
            raise reject("bounds", f"a sidecar of {len(data)} bytes")
        return data

    def check(self) -> None:
        """Nothing, when it can be one: KvpackRejected."""
        for count, limit, what in (
            (len(self.ranges), limits.SIDECAR_CHANNELS, "channels"),
            (len(self.norms), limits.SIDECAR_TOKENS, "tokens"),
            (len(self.sinks), min(limits.SIDECAR_SINKS, len(self.norms)), "sinks"),
        ):
            if not 1 <= count <= limit:
                raise reject("bounds", f"a sidecar of {count} {what}")
        values = [value for pair in self.ranges for value in pair] + list(self.norms)
        if not np.isfinite(np.array(values, dtype=np.float64)).all():
            raise reject("semantics", "a sidecar with a number that is not finite")
        if any(low > high for low, high in self.ranges) or min(self.norms) < 0:
            raise reject("semantics", "a sidecar with an impossible range")
        if self.sinks != _largest(self.norms, len(self.sinks)):
            raise reject("semantics", "a sidecar whose sinks are not the largest norms")


def decode_sidecar(data: bytes | memoryview) -> Sidecar:
    """The sidecar of a KVSSC1 object: KvpackRejected."""
    reader = Reader(data, MAGIC)
    reader.head(MAGIC)
    ranges = reader.many(
        reader.u32(),
        lambda: (_half(reader), _half(reader)),
        limit=limits.SIDECAR_CHANNELS,
        nbytes=4,
    )
    norms = reader.many(reader.u32(), lambda: _half(reader), limit=limits.SIDECAR_TOKENS, nbytes=2)
    sinks = reader.many(reader.u16(), lambda: _sink(reader), limit=limits.SIDECAR_SINKS, nbytes=8)
    reader.end()
    sidecar = Sidecar(ranges=ranges, norms=norms, sinks=sinks)
    check_canonical(data, sidecar.encoded(), what=MAGIC)
    return sidecar


def _largest(norms: tuple[float, ...] | list[float], count: int) -> tuple[Sink, ...]:
    order = sorted(range(len(norms)), key=lambda token: (-norms[token], token))
    return tuple(Sink(token, norms[token]) for token in order[:count])


def _halves(values: list[float] | tuple[float, ...]) -> bytes:
    return np.array(values, dtype="<f2").tobytes()


def _half(reader: Reader) -> float:
    return float(np.frombuffer(reader.take(2), dtype="<f2")[0])


def _sink(reader: Reader) -> Sink:
    sink = Sink(reader.u32(), _half(reader))
    reader.zero(2)
    return sink
