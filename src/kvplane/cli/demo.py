"""`kvplane demo`: a hybrid model stops, resumes in another process and forks, bits compared."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from kvplane.cli.output import console, human

if TYPE_CHECKING:
    from torch import Tensor

    from kvplane.integrations.transformers.conversation import Conversation

DOCUMENT_TOKENS = 2600
SHARED_TOKENS = 1024
SAID_TOKENS = 100
OTHER_TEXT = "\n\nIn other words, the main difference between a list and a tuple is that "
FAILED = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs' logits, step by step.

    Args:
        what: which runs.
        wanted: whether every bit should be equal.
        steps: steps compared.
        equal: steps whose logits are equal bit for bit.
        largest: the largest difference of a logit.
    """

    what: str
    wanted: bool
    steps: int
    equal: int
    largest: float

    @property
    def good(self) -> bool:
        """Whether it came out as it should."""
        return (self.equal == self.steps) == self.wanted


def compared(what: str, first: "Tensor", second: "Tensor", *, wanted: bool = True) -> Comparison:
    """Compare two runs' logits, `[steps, vocabulary]`."""
    equal = sum(bool((a == b).all()) for a, b in zip(first, second, strict=True))
    largest = float((first - second).abs().max())
    return Comparison(what=what, wanted=wanted, steps=len(first), equal=equal, largest=largest)


def demo(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Watch the shipped model stop, resume in another process and fork, bits compared.

    Example: kvplane demo

    Args:
        as_json: Print one JSON object instead.
    """
    out = Console(stderr=True, quiet=True) if as_json else console()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvplane-demo-") as folder:
        show = _Show(Path(folder), out)
        comparisons = list(show.run())
    facts = {**show.facts, "seconds": time.perf_counter() - begin}
    good = all(comparison.good for comparison in comparisons)
    if as_json:
        rows = [{**dataclasses.asdict(c), "good": c.good} for c in comparisons]
        print(json.dumps({"good": good, "comparisons": rows, **facts}))  # noqa: T201
    else:
        out.print()
        verdict = "[green]every comparison came out as it should[/]"
        out.print(verdict if good else "[red]a comparison did not come out as it should[/]")
        out.print(f"{facts['seconds']:.0f} s")
    if not good:
        raise SystemExit(FAILED)


class _Show:
    def __init__(self, folder: Path, out: Console) -> None:
        self._folder = folder
        self._root = str(folder / "root")
        self._out = out
        self.facts: dict[str, Any] = {}

    def run(self) -> Iterator[Comparison]:
        """Every act, in order; each comparison as it is made."""
        from kvplane.cli import demo_parts as parts  # noqa: PLC0415 - torch, seconds
        from kvplane.integrations.transformers.conversation import converse  # noqa: PLC0415
        from kvplane.integrations.transformers.loading import SHIPPED, load_model  # noqa: PLC0415
        from kvplane.models.nano import BOS, encode, heldout_text  # noqa: PLC0415
        from kvplane.pack import PrefixCache, open_root  # noqa: PLC0415

        named = load_model(SHIPPED)
        document = [BOS, *encode(heldout_text())][:DOCUMENT_TOKENS]
        self._title(f"1. read {len(document):,} tokens of documentation, say some more, stop")
        talk = converse(named, prefixes=PrefixCache(self._root, named.fingerprint))
        talk.read(document[:SHARED_TOKENS])
        talk.read(document)
        said = list(talk.say(SAID_TOKENS))
        self._quote(talk, said)
        rings = {g.id: g.sliding_window for g in talk.session.groups if g.sliding_window}
        wraps = {name: talk.session.position // window for name, window in rings.items()}
        self._out.print(
            f"position {talk.session.position:,}; rings wrapped {max(wraps.values())} times"
        )
        written = talk.save(open_root(self._root), parts.SESSION)
        self._out.print(f"saved: {human(written.nbytes_written)} new")
        fork = talk.cache.fork()
        frozen = talk.session.snapshot()
        logits = parts.undisturbed(talk)[1]

        self._title("2. a second process resumes it")
        self._part("resume", {"part": "resume", "root": self._root})
        again, resumed, facts = parts.result(self._folder, "resume")
        self._out.print(f"{facts['reused']:,} tokens reused, loaded in {facts['load_s']:.3f} s")
        self._quote(talk, again)
        yield self._told(compared("resumed against undisturbed", logits, resumed))

        self._title("3. a fork, made when it was saved, goes on from there too")
        from kvplane.integrations.transformers.calls import prefill  # noqa: PLC0415

        branch = converse(named)
        branch.cache, branch.logits = fork, prefill(named.model, fork, [*document, *said])
        yield self._told(compared("fork against undisturbed", logits, parts.undisturbed(branch)[1]))

        self._title(f"4. another prompt with the same first {SHARED_TOKENS:,} tokens")
        prompt = [*document[:SHARED_TOKENS], *encode(OTHER_TEXT)]
        for name, cold in (("warm", False), ("cold", True)):
            orders = {"part": "reuse", "root": self._root, "ids": prompt, "cold": cold}
            self._part(name, orders)
        _, warm, warm_facts = parts.result(self._folder, "warm")
        other, cold_logits, cold_facts = parts.result(self._folder, "cold")
        self._quote(talk, other)
        self._out.print(
            f"first token after {warm_facts['first_token_s']:.3f} s with "
            f"{warm_facts['reused']:,} of {len(prompt):,} tokens reused, "
            f"{cold_facts['first_token_s']:.3f} s cold"
        )
        yield self._told(compared("reused prefix against a cold run", cold_logits, warm))
        self.facts |= {"warm": warm_facts, "cold": cold_facts, "resumed": facts}

        self._title("5. where bits differ: rows summed in buffer order, at another rotation")
        yield from self._rotations(named, frozen, [*document, *said])

        self._title("6. memory, planned and held")
        self._memory(talk)

    def _rotations(self, named: Any, frozen: Any, ids: list[int]) -> Iterator[Comparison]:  # noqa: ANN401
        from kvplane.cli import demo_parts as parts  # noqa: PLC0415
        from kvplane.integrations.transformers.conversation import converse  # noqa: PLC0415

        unrotated = dataclasses.replace(
            frozen, cursors={name: (*cursor[:3], 0) for name, cursor in frozen.cursors.items()}
        )
        implementation = named.model.config._attn_implementation  # noqa: SLF001 - the host's name
        runs = {}
        try:
            for name, snapshot in (("a", frozen), ("b", frozen), ("zero", unrotated)):
                talk = converse(named, attention="physical")
                store = talk.cache.made_store(named.model.dtype, named.model.device)
                talk.cache.adopt(store.restore(snapshot))
                talk.read(ids)
                runs[name] = parts.undisturbed(talk)[1]
        finally:
            named.model.set_attn_implementation(implementation)
        what = "physical order, restored at the kept rotation"
        yield self._told(compared(what, runs["a"], runs["b"]))
        what = "physical order, restored at rotation 0"
        yield self._told(compared(what, runs["a"], runs["zero"], wanted=False))

    def _memory(self, talk: "Conversation") -> None:
        from kvplane.footprint import footprint  # noqa: PLC0415
        from kvplane.integrations.transformers.conversation import SLACK  # noqa: PLC0415

        session = talk.session
        held = session.store.memory().sessions[0]
        plan = footprint(
            session.geometry,
            context=session.position,
            slack=SLACK,
            page_nbytes=PAGESIZE,
            max_context=talk.cache.max_context,
        )
        rows = sum(part.rows_held for part in held.values())
        pages = sum(part.pages_held for part in held.values())
        self._out.print(
            f"planned for {session.position:,} tokens: {plan.session.rows_held:,} bytes"
        )
        self._out.print(f"held: {rows:,} bytes of rows in {pages:,} bytes of pages")
        self.facts |= {"planned": plan.session.rows_held, "rows": rows, "pages": pages}

    def _part(self, name: str, orders: dict[str, Any]) -> None:
        from kvplane.cli import demo_parts as parts  # noqa: PLC0415

        command = parts.ordered(self._folder, name, orders)
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
        if done.returncode:
            sys.stderr.write(done.stderr)
            raise SystemExit(FAILED)

    def _title(self, text: str) -> None:
        self._out.print()
        self._out.print(f"[bold]{text}[/]")

    def _quote(self, talk: "Conversation", ids: list[int]) -> None:
        text = "".join(talk.named.words.pieces(ids))
        self._out.print(f"  ... {text!r}", style="dim", markup=False)

    def _told(self, comparison: Comparison) -> Comparison:
        colour = "green" if comparison.good else "red"
        if comparison.equal == comparison.steps:
            found = "every bit equal"
        else:
            differ = comparison.steps - comparison.equal
            found = f"{differ} steps differ, by up to {comparison.largest:.1e}"
        wish = "" if comparison.wanted else " (as they must: the rotation is part of the data)"
        self._out.print(f"[{colour}]{comparison.what}: {comparison.steps} steps, {found}{wish}[/]")
        return comparison
