"""What names a text without holding it: a keyed hash over its tokens, block by block.

    auxiliary inputs ─► aux_root ─► context ─► node 0 ─► node 1 (tokens 0..255) ─► ...

The last node and the number of tokens are an `InputCut`, which a manifest is for. A node after a
whole block is one where others may go on.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from kvplane.kvpack import limits
from kvplane.kvpack.keys import Keys, keyed
from kvplane.kvpack.wire import Reader, id32, reject, u32, u64

NONE = bytes(32)


class Auxiliary(NamedTuple):
    """An input beside tokens: 32 bytes that say its kind, and 32 that say which."""

    kind: bytes
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCut:
    """A text up to a number of tokens."""

    token_root: bytes
    aux_root: bytes
    num_tokens: int

    def encoded(self) -> bytes:
        """72 bytes."""
        return id32(self.token_root) + id32(self.aux_root) + u64(self.num_tokens)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """The next 72 bytes."""
        return cls(token_root=reader.id32(), aux_root=reader.id32(), num_tokens=reader.u64())

    def check(self) -> None:
        """Nothing, when it can be stored: KvpackRejected."""
        if self.num_tokens == 0:
            raise reject("semantics", "a cut without tokens is not stored")


class PrefixNode(NamedTuple):
    """The hash after so many tokens, and whether others may go on from it."""

    num_tokens: int
    node: bytes
    reusable: bool


def aux_root(keys: Keys, inputs: Sequence[Auxiliary] = ()) -> bytes:
    """What stands for all inputs beside tokens, in their order."""
    parts = [id32(keys.tenant), u32(len(inputs))]
    for ordinal, one in enumerate(inputs):
        if NONE in (id32(one.kind), id32(one.value)):
            raise reject("semantics", f"auxiliary input {ordinal} is all zero")
        parts += [u64(ordinal), u32(32), one.kind, u32(32), one.value]
    return keyed(keys.stable("prefix"), "kvpack/v1/auxiliary-input-root", *parts)


def prefix_nodes(
    keys: Keys,
    tokens: Sequence[int],
    *,
    semantic_id: bytes,
    family_id: bytes,
    aux: bytes,
) -> Iterator[PrefixNode]:
    """Every node after the root, one a block of 256 tokens; the last block may be shorter."""
    key = keys.stable("prefix")
    context = keyed(
        key, "kvpack/v1/prefix-context", keys.tenant, id32(semantic_id), id32(family_id), id32(aux)
    )
    node = keyed(key, "kvpack/v1/prefix-root", context)
    for number, first in enumerate(range(0, len(tokens), limits.BLOCK)):
        block = tokens[first : first + limits.BLOCK]
        node = keyed(
            key,
            "kvpack/v1/prefix-node",
            context,
            node,
            u64(number),
            u64(first),
            u32(len(block)),
            u32(4 * len(block)),
            *map(u32, block),
        )
        yield PrefixNode(first + len(block), node, len(block) == limits.BLOCK)


def input_cut(
    keys: Keys,
    tokens: Sequence[int],
    *,
    semantic_id: bytes,
    family_id: bytes,
    inputs: Sequence[Auxiliary] = (),
) -> InputCut:
    """The cut after these tokens.

    Raises:
        KvpackRejected: there are none, or one does not fit 32 bits.
    """
    aux = aux_root(keys, inputs)
    nodes = prefix_nodes(keys, tokens, semantic_id=semantic_id, family_id=family_id, aux=aux)
    last = next(iter(deque(nodes, maxlen=1)), None)
    if last is None:
        raise reject("semantics", "a cut without tokens is not stored")
    return InputCut(token_root=last.node, aux_root=aux, num_tokens=last.num_tokens)
