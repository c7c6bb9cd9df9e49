"""Reading a cut: a pack, the packs that it goes on from, and every piece, verified.

    full ◄── delta 1 ◄── delta 2 ...        each names its parent's manifest; at most seven

Nothing is given out before all packs are known to belong together. Rows are given out piece by
piece, each after its own verification, so that a reader needs memory for one piece.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvplane.kvpack import limits
from kvplane.kvpack.chunk import Place, decode_chunk
from kvplane.kvpack.family import FamilyState
from kvplane.kvpack.keys import Keys, same
from kvplane.kvpack.manifest import ChunkRef, Manifest
from kvplane.kvpack.prefix import Auxiliary, input_cut
from kvplane.kvpack.schema import ChunkSpan
from kvplane.kvpack.wire import reject


class Rows(NamedTuple):
    """The rows of some tokens of one state, in token order where its token axis is the first."""

    state: FamilyState
    span: ChunkSpan
    plaintext: bytes


def check_lineage(manifests: Sequence[Manifest]) -> None:
    """Nothing, when these lead from a full manifest to the last, each from the one before.

    Raises:
        KvpackRejected: one is missing, of another model or text, or out of turn.
    """
    if not manifests:
        raise reject("graph", "no manifest")
    if manifests[0].schema.delta is not None:
        raise reject("graph", "the first manifest goes on from one that is not here")
    if len(manifests) > limits.DELTA_DEPTH + 1:
        raise reject("bounds", f"{len(manifests)} manifests in a row")
    for depth, (before, after) in enumerate(pairwise(manifests), 1):
        delta = after.schema.delta
        if delta is None or delta.depth != depth:
            raise reject("graph", f"manifest {depth} is no delta of depth {depth}")
        if not same(delta.parent_manifest, before.id) or delta.parent_cut != before.cut:
            raise reject("graph", f"manifest {depth} goes on from another than the one before")
        one = (before.tenant, before.semantics, before.family)
        if one != (after.tenant, after.semantics, after.family):
            raise reject("graph", f"manifest {depth} is of another tenant, model or family")


def check_tokens(
    keys: Keys, manifest: Manifest, tokens: Sequence[int], inputs: Sequence[Auxiliary] = ()
) -> None:
    """Nothing, when a manifest is for exactly these tokens: KvpackRejected."""
    cut = input_cut(
        keys,
        tokens,
        semantic_id=manifest.semantics.id,
        family_id=manifest.family.id,
        inputs=inputs,
    )
    equal = same(cut.token_root, manifest.cut.token_root), same(cut.aux_root, manifest.cut.aux_root)
    if cut.num_tokens != manifest.cut.num_tokens or not all(equal):
        raise reject("semantics", "a manifest of another text")


def read_rows(
    keys: Keys, manifests: Sequence[Manifest], fetch: Callable[[ChunkRef], bytes]
) -> Iterator[Rows]:
    """Every piece of a cut, verified.

    Args:
        keys: the tenant's.
        manifests: from the full one to the cut's; one alone when it is full.
        fetch: the file of a reference.

    Raises:
        KvpackRejected: the manifests do not belong together, or a piece is not what they say.
    """
    check_lineage(manifests)
    for manifest in manifests:
        family_id = manifest.family.id
        for state, span, ref in manifest.pieces():
            place = Place(family_id=family_id, key=state.key, span=span, codec=state.codec)
            yield Rows(state, span, decode_chunk(keys, fetch(ref), place=place, ref=ref))
