"""Which rows of a plane were ever written: what its memory holds, whatever is live now."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Touched:
    """A union of row ranges.

    Attributes:
        runs: ascending, disjoint, not adjacent.
    """

    runs: list[range] = field(default_factory=list)

    def add(self, run: range) -> None:
        """Note that rows were written."""
        runs = self.runs
        if len(runs) == 1 and runs[0].start <= run.start <= runs[0].stop:
            # what almost every step does: go on where the last one ended, or go round again
            if run.stop > runs[0].stop:
                runs[0] = range(runs[0].start, run.stop)
            return
        merged: list[range] = []
        for part in sorted([*runs, run], key=lambda part: part.start):
            if merged and part.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, part.stop))
            else:
                merged.append(part)
        self.runs = merged
