"""The deepest cut that a prompt can go on from, and why no deeper.

    prompt    | b0 | b1 | b2 | tail        L = one token short: the last is always read again
    cuts          x         x    x         by the chain of their whole blocks, then by position

A cut is whole in all layer groups or was not written, so depth alone decides; a digest only finds
it, the prompt's ids are compared one by one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvplane.errors import PackError
from kvplane.pack.blob import blob_name
from kvplane.pack.chain import Aux, Chain
from kvplane.pack.documents import Cut
from kvplane.pack.limits import BLOCK, DOCUMENT_NBYTES
from kvplane.storage import Storage

SEAL_LENGTH = 16


class CutName(NamedTuple):
    """What the name of a cut's file says."""

    position: int
    tail: str
    seal: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a prompt can reuse.

    Args:
        position: tokens that need not be read; 0 when there is no cut.
        seen: tokens, in whole blocks, that some prompt seen before agrees on.
        reason: why no deeper, in words; "" when it is the whole prompt but its last token.
        cut: the cut; None for none.
        file: its file.
    """

    position: int
    seen: int
    reason: str
    cut: Cut | None = None
    file: str | None = None


def cut_folder(fingerprint: str, chain: str) -> str:
    """Where the cuts after these whole blocks are."""
    return f"cuts/{fingerprint}/{chain}"


def node_file(fingerprint: str, chain: str) -> str:
    """The index entry of a block that was seen."""
    return f"nodes/{fingerprint}/{chain}.json"


def cut_names(storage: Storage, folder: str) -> list[CutName]:
    """The cuts in a folder; names that are none are passed over."""
    names = []
    for file in storage.list(folder):
        parts = file.rsplit("/", 1)[-1].split(".")
        good = len(parts) == 4 and parts[3] == "json" and parts[0].isdigit()  # noqa: PLR2004
        if good and str(int(parts[0])) == parts[0]:
            names.append(CutName(int(parts[0]), parts[1], parts[2], file))
    return names


class Matcher:
    """Matches prompts of one model against a root.

    Args:
        storage: an opened root.
        fingerprint: hex of the model's.
        group_ids: the model's groups; a cut of others is no use.
        numerics: of the store that will go on.
        salt: of the tenant.
    """

    def __init__(
        self,
        storage: Storage,
        fingerprint: str,
        *,
        group_ids: Sequence[str],
        numerics: Mapping[str, Any],
        salt: bytes = b"",
    ) -> None:
        self._storage = storage
        self._fingerprint = fingerprint
        self._group_ids = set(group_ids)
        self._numerics = dict(numerics)
        self._salt = salt

    def matches(
        self, tokens: Sequence[int], *, aux: Sequence[Aux] = (), strict: bool = False
    ) -> Iterator[Match]:
        """Every usable cut of a prompt, deepest first, and at last the match of nothing."""
        limit = max(0, len(tokens) - 1)
        chain = Chain(self._fingerprint, tokens, aux=aux, salt=self._salt)
        seen = self._seen(chain, len(tokens) // BLOCK)
        passed: list[str] = []
        for num_blocks in range(limit // BLOCK, -1, -1):
            folder = cut_folder(self._fingerprint, chain.at(num_blocks))
            named = [
                name
                for name in cut_names(self._storage, folder)
                if name.position <= min(limit, (num_blocks + 1) * BLOCK - 1)
                and name.position // BLOCK == num_blocks
                and name.tail == chain.tail(name.position)
            ]
            for cut, file in self._usable(named, tokens, aux, chain, passed, strict=strict):
                reason = self._reason(cut.state.position, limit, seen, passed)
                yield Match(
                    position=cut.state.position, seen=seen, reason=reason, cut=cut, file=file
                )
        yield Match(position=0, seen=seen, reason=self._reason(0, limit, seen, passed))

    def _usable(
        self,
        named: Sequence[CutName],
        tokens: Sequence[int],
        aux: Sequence[Aux],
        chain: Chain,
        passed: list[str],
        *,
        strict: bool,
    ) -> Iterator[tuple[Cut, str]]:
        for position in sorted({name.position for name in named}, reverse=True):
            found = []
            for name in named:
                if name.position != position:
                    continue
                cut = self._opened(name, tokens, aux, chain, passed)
                if cut is not None:
                    own = all(numerics == self._numerics for _, numerics in cut.state.numerics)
                    canonical = cut.state.canonical == position
                    if strict and not (own and canonical):
                        what = "of other numerics" if canonical else "not canonical"
                        passed.append(f"the cut at {position} is {what}")
                        continue
                    found.append(((not own, not canonical, name.seal), cut, name.file))
            for _, cut, file in sorted(found, key=lambda item: item[0]):
                yield cut, file

    def _opened(
        self,
        name: CutName,
        tokens: Sequence[int],
        aux: Sequence[Aux],
        chain: Chain,
        passed: list[str],
    ) -> Cut | None:
        """The cut, when it is what its name says and the prompt begins with it."""
        path = f"{self._storage.location}/{name.file}"
        try:
            data = self._storage.read(name.file, limit=DOCUMENT_NBYTES)
            cut = Cut.decoded(data, path)
        except PackError as error:
            passed.append(f"the cut at {name.position} is damaged: {error}")
            return None
        if sealed_name(cut, chain.tail(cut.state.position), data) != name.file:
            passed.append(f"the cut at {name.position} is damaged: its name is another's")
            return None
        if cut.state.fingerprint != self._fingerprint or set(cut.state.groups) != self._group_ids:
            passed.append(f"the cut at {name.position} is another model's")
            return None
        held = tuple(item for item in aux if item.first < cut.state.position)
        if cut.tokens != tuple(tokens[: cut.state.position]) or cut.aux != held:
            # equal digests, other ids: a collision, or somebody's forgery
            passed.append(f"the cut at {name.position} is of other tokens")
            return None
        gone = [b for b in sorted(cut.state.blobs) if not self._storage.exists(blob_name(b))]
        if gone:
            passed.append(f"the cut at {name.position} is evicted: blob {gone[0][:16]}... is gone")
            return None
        return cut

    def _seen(self, chain: Chain, num_blocks: int) -> int:
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self._storage.exists(node_file(self._fingerprint, chain.at(middle))):
                low = middle
            else:
                high = middle - 1
        return low * BLOCK

    def _reason(self, position: int, limit: int, seen: int, passed: Sequence[str]) -> str:
        if position >= limit:
            return ""
        if passed:
            return "; ".join(passed[:4])
        if seen > position:
            return f"{seen} tokens were seen before, no cut was taken after {position}"
        return f"nothing that was seen before agrees with the prompt beyond {max(seen, position)}"


def sealed_name(cut: Cut, tail: str, data: bytes) -> str:
    """The file of a cut: its name carries its content."""
    seal = json.loads(data)["self"][:SEAL_LENGTH]
    folder = cut_folder(cut.state.fingerprint, cut.chain)
    return f"{folder}/{cut.state.position}.{tail}.{seal}.json"
