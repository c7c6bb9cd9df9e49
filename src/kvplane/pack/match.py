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

from kvplane.errors import ArgumentError, PackError
from kvplane.pack.blob import blob_name
from kvplane.pack.chain import ID_NBYTES, TAIL_LENGTH, Aux, Chain, packed_ids
from kvplane.pack.documents import Cut, Node
from kvplane.pack.encoding import is_hex
from kvplane.pack.fingerprint import Fingerprint
from kvplane.pack.ids import facts_of
from kvplane.pack.inputs import ordered
from kvplane.pack.limits import BLOCK, DOCUMENT_NBYTES, NODE_NBYTES
from kvplane.storage import Storage

SEAL_LENGTH = 16
REASONS = 4
_CUT_PARTS = 4


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
        nbytes: rows that loading it gives.
    """

    position: int
    seen: int
    reason: str
    cut: Cut | None = None
    file: str | None = None
    nbytes: int = 0


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
        parts = file.removeprefix(f"{folder}/").split(".")
        if len(parts) != _CUT_PARTS or parts[3] != "json":
            continue
        position, tail, seal, _ = parts
        plain = position.isascii() and position.isdigit() and len(position) <= len(str(1 << 24))
        if (
            plain
            and position[0] != "0"
            and (tail == "-" or is_hex(tail, length=TAIL_LENGTH))
            and is_hex(seal, length=SEAL_LENGTH)
        ):
            names.append(CutName(int(position), tail, seal, file))
    return names


def sealed_name(cut: Cut, tail: str, data: bytes) -> str:
    """The file of a cut: its name carries its content."""
    seal = json.loads(data)["self"][:SEAL_LENGTH]
    folder = cut_folder(cut.state.fingerprint, cut.chain)
    return f"{folder}/{cut.state.position}.{tail}.{seal}.json"


class Prompt:
    """A prompt as it is matched: ids, other inputs and their chain."""

    def __init__(
        self, fingerprint: str, tokens: Sequence[int], *, aux: Sequence[Aux], salt: bytes
    ) -> None:
        self.ids = packed_ids(tokens)
        self.aux = ordered(aux)
        self.chain = Chain.packed(fingerprint, self.ids, aux=self.aux, salt=salt)
        # the last token is always read again: somebody has to say what follows
        self.limit = max(0, len(tokens) - 1)

    def begins_with(self, cut: Cut) -> bool:
        """Whether every id and other input of a cut is the prompt's."""
        position = cut.state.position
        held = tuple(item for item in self.aux if item.first < position)
        return self.ids[: ID_NBYTES * position] == cut.ids and held == cut.aux


class Matcher:
    """Matches prompts of one model against a root.

    Args:
        storage: an opened root.
        fingerprint: the model's; a cut of other groups is no use.
        numerics: of the store that will go on; None when it is not known.
        salt: of the tenant.
    """

    def __init__(
        self,
        storage: Storage,
        fingerprint: Fingerprint,
        *,
        numerics: Mapping[str, Any] | None,
        salt: bytes = b"",
    ) -> None:
        self._storage = storage
        self._fingerprint = fingerprint.hex
        self._layers = {name: len(held) for name, held in fingerprint.parts["groups"].items()}
        self._numerics = None if numerics is None else dict(numerics)
        self._salt = salt

    def matches(
        self, tokens: Sequence[int], *, aux: Sequence[Aux] = (), strict: bool = False
    ) -> Iterator[Match]:
        """Every usable cut of a prompt, deepest first, and at last the match of nothing.

        Raises:
            ArgumentError: ids outside 32 bits, or strict with no numerics to compare.
        """
        if strict and self._numerics is None:
            raise ArgumentError(argument="strict", expected="with a store", got="none")
        prompt = Prompt(self._fingerprint, tokens, aux=aux, salt=self._salt)
        seen = self._seen(prompt, len(tokens) // BLOCK)
        passed: list[str] = []
        for num_blocks in range(prompt.limit // BLOCK, -1, -1):
            for cut, file in self._after(num_blocks, prompt, passed, strict=strict):
                yield Match(
                    position=cut.state.position,
                    seen=max(seen, cut.state.position - cut.state.position % BLOCK),
                    reason=self._reason(cut.state.position, prompt.limit, seen, passed),
                    cut=cut,
                    file=file,
                    nbytes=self._nbytes(cut),
                )
        yield Match(position=0, seen=seen, reason=self._reason(0, prompt.limit, seen, passed))

    def _after(
        self, num_blocks: int, prompt: Prompt, passed: list[str], *, strict: bool
    ) -> Iterator[tuple[Cut, str]]:
        """The usable cuts whose whole blocks are the prompt's first so many, deepest first."""
        folder = cut_folder(self._fingerprint, prompt.chain.at(num_blocks))
        by_position: dict[int, list[CutName]] = {}
        for name in cut_names(self._storage, folder):
            fits = 0 < name.position <= prompt.limit and name.position // BLOCK == num_blocks
            if fits and name.tail == prompt.chain.tail(name.position):
                by_position.setdefault(name.position, []).append(name)
        for position in sorted(by_position, reverse=True):
            found = []
            for name in by_position[position]:
                cut = self._opened(name, prompt, passed)
                if cut is None:
                    continue
                own = all(numerics == self._numerics for _, numerics in cut.state.numerics)
                if strict and not (own and cut.state.canonical == position):
                    what = "of other numerics" if not own else "not canonical"
                    passed.append(f"the cut at {position} is {what}")
                    continue
                found.append(((not own, -cut.state.canonical, name.seal), cut, name.file))
            for _, cut, file in sorted(found, key=lambda item: item[0]):
                yield cut, file

    def _opened(self, name: CutName, prompt: Prompt, passed: list[str]) -> Cut | None:
        """The cut, when it is what its name says and the prompt begins with it."""
        path = f"{self._storage.location}/{name.file}"
        try:
            data = self._storage.read(name.file, limit=DOCUMENT_NBYTES)
            cut = Cut.decoded(data, path)
        except PackError as error:
            passed.append(f"the cut at {name.position} is damaged: {error}")
            return None
        if sealed_name(cut, name.tail, data) != name.file:
            passed.append(f"the cut at {name.position} is damaged: its name is another's")
            return None
        if set(cut.state.groups) != set(self._layers):
            passed.append(f"the cut at {name.position} is of other layer groups")
            return None
        if not prompt.begins_with(cut):
            # equal digests, other ids: a collision, or somebody's forgery
            passed.append(f"the cut at {name.position} is of other tokens")
            return None
        for blob in sorted(cut.state.blobs):
            if not self._storage.exists(blob_name(blob)):
                what = f"evicted: blob {blob[:16]}... is gone"
                passed.append(f"the cut at {name.position} is {what}")
                return None
        return cut

    def _seen(self, prompt: Prompt, num_blocks: int) -> int:
        """Tokens up to the deepest block that has a node: some may be missing, none is trusted.

        Whoever puts the node of a block has put those before it, so halves are enough; where one
        went missing, less is said to have been seen, and nothing else changes.
        """
        least, most = 0, num_blocks
        while least < most:
            middle = (least + most + 1) // 2
            if self._storage.exists(node_file(self._fingerprint, prompt.chain.at(middle))):
                least = middle
            else:
                most = middle - 1
        while least and not self._is_node(prompt, least - 1):
            least -= 1
        return least * BLOCK

    def _is_node(self, prompt: Prompt, block: int) -> bool:
        file = node_file(self._fingerprint, prompt.chain.at(block + 1))
        try:
            node = Node.decoded(self._storage.read(file, limit=NODE_NBYTES), file)
        except PackError:
            return False
        return node == Node(
            fingerprint=self._fingerprint,
            chain=prompt.chain.at(block + 1),
            parent=prompt.chain.at(block),
            block=block,
            ids=prompt.ids[ID_NBYTES * BLOCK * block : ID_NBYTES * BLOCK * (block + 1)],
        )

    def _nbytes(self, cut: Cut) -> int:
        total = 0
        for name, rows in cut.state.groups.items():
            facts = facts_of(name)
            if facts is not None:
                count = cut.state.position - rows.first
                total += count * self._layers[name] * facts.row_nbytes
        return total

    def _reason(self, position: int, limit: int, seen: int, passed: Sequence[str]) -> str:
        if position >= limit:
            return ""
        if passed:
            more = len(passed) - REASONS
            return "; ".join(passed[:REASONS]) + (f"; and {more} more" if more > 0 else "")
        if seen > position:
            return f"{seen} tokens were seen before, no cut was taken after {position}"
        return f"nothing that was seen before agrees with the prompt beyond {max(seen, position)}"
