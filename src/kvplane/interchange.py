"""Sessions to kvpack and back: what that format says, and what has to lie beside it.

    <folder>/<manifest id>.kvpack           the sealed manifest
    <folder>/chunks/<object key>.kvchunk    rows of one state and some tokens
    <folder>/session.json                   what kvpack cannot say: ids, rings, layers, provenance;
                                            session.sealed, encrypted, where the pack is

What is beside is believed only as far as the pack vouches for it: ids by the keyed hash over them,
layers, weights, numerics and tokenizer by the ids of the model and family, which follow from them.
"""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvplane.errors import ArgumentError, KvpackRejected, PackMismatch, StorageMissing
from kvplane.kvpack import (
    Auxiliary,
    ChunkRef,
    ChunkSpan,
    Codec,
    DType,
    Family,
    FamilyState,
    Keys,
    Manifest,
    Mode,
    Payload,
    Place,
    Seal,
    Semantics,
    StateKey,
    TokenAxis,
    check_tokens,
    decode_pack,
    encode_chunk,
    encode_pack,
    grid_spans,
    input_cut,
    layer_groups,
    read_rows,
    realize,
)
from kvplane.kvpack import limits as kvpack_limits
from kvplane.kvpack.keys import hkdf
from kvplane.kvpack.seal import NONCE_NBYTES, SALT_NBYTES, decrypt, encrypt
from kvplane.pack.documents import SavedSession
from kvplane.pack.encoding import canonical
from kvplane.pack.groups import groups_of
from kvplane.pack.limits import DOCUMENT_NBYTES
from kvplane.pack.whole import Whole
from kvplane.storage import Storage

DTYPES = {"float16": DType.F16, "bfloat16": DType.BF16, "float32": DType.F32}
# full layers in long pieces, windows on the blocks' grid: neighbouring checkpoints share them
FULL_TOKENS = 2048
WINDOW_TOKENS = 256
BESIDE = "session.json"
SEALED = "session.sealed"
_SEALED = b"kvplane/kvpack-session/1\0"
SEAL_NBYTES = SALT_NBYTES + NONCE_NBYTES
_PACK = re.compile(r"[0-9a-f]{64}\.kvpack")


class Exported(NamedTuple):
    """The pack's file, and what was written."""

    pack: str
    num_chunks: int
    nbytes: int


def tenant_id(name: str) -> bytes:
    """The 32 bytes that stand for a tenant's name."""
    return hashlib.sha256(b"kvplane/kvpack-tenant/1\0" + name.encode()).digest()


def export_kvpack(
    target: Storage,
    whole: Whole,
    keys: Keys,
    *,
    codec: Codec = Codec.RAW,
    encrypted: bool = False,
) -> Exported:
    """Write a session as kvpack.

    Args:
        target: where; pieces that are there already are not written again.
        whole: the session.
        keys: the tenant's.
        codec: of the pieces.
        encrypted: pieces and manifest both.

    Raises:
        ArgumentError: no ids are known, it began elsewhere than at 0, is empty, has states or a
            dtype that the format has no word for.
        KvpackRejected: it cannot be expressed.
        StorageError: something could not be written; without the pack's file nothing is there.
    """
    saved = whole.saved
    _check_expressible(whole)
    family, semantics = _family(saved, codec), _semantics(saved)
    cut = input_cut(
        keys,
        saved.tokens or (),
        semantic_id=semantics.id,
        family_id=family.id,
        inputs=_inputs(saved),
    )
    tails = {
        state.key: whole.rows[state.key.layer][0].shape[0]
        for state in family.states
        if state.rule is TokenAxis.TAIL_WINDOW
    }
    schema = realize(family, cut, groups=layer_groups(family), tails=tails, spans=_spans)
    num_chunks = nbytes = 0
    payload = []
    for state, realized in zip(family.states, schema.states, strict=True):
        rows = _tensor(whole, state.key)
        refs = []
        for span in realized.spans:
            first = span.token_start - realized.logical_start
            place = Place(family_id=family.id, key=state.key, span=span, codec=codec)
            chunk = encode_chunk(
                keys,
                place,
                _bytes(rows[first : first + span.token_count]),
                seal=Seal.fresh() if encrypted else None,
            )
            if target.put(_chunk_file(chunk.ref), chunk.data):
                num_chunks += 1
                nbytes += len(chunk.data)
            refs.append(chunk.ref)
        payload.append(Payload(state.key, tuple(refs)))
    manifest = Manifest(
        tenant=keys.tenant,
        epoch=keys.active_epoch,
        semantics=semantics,
        cut=cut,
        family=family,
        schema=schema,
        payload=tuple(payload),
    )
    _put_beside(target, saved.encoded(), keys, encrypted=encrypted)
    name = f"{manifest.id.hex()}.kvpack"
    data = encode_pack(keys, manifest, seal=Seal.fresh() if encrypted else None)
    target.replace(name, data)
    return Exported(name, num_chunks, nbytes + len(data))


def import_kvpack(source: Storage, keys: Keys, *, pack: str | None = None) -> Whole:
    """A session that was written as kvpack, every piece of it verified.

    Args:
        source: where it lies.
        keys: the tenant's.
        pack: the pack's file; None: the one that is there.

    Raises:
        ArgumentError: no pack, or several.
        KvpackRejected: the pack or a piece is not what it should be.
        PackMismatch: what lies beside it is of another model or session.
        StorageError: something could not be read.
    """
    name = _the_pack(source, pack)
    limit = kvpack_limits.MANIFEST_NBYTES + 3 * kvpack_limits.ALIGNMENT
    manifest = decode_pack(keys, source.read(name, limit=limit))
    beside = _beside(source, keys, epoch=manifest.epoch)
    saved = SavedSession.decoded(beside, f"{source.location}/{BESIDE}")
    _check_vouched(keys, manifest, saved)
    parts: dict[StateKey, list[bytes]] = {}
    for state, _, plaintext in read_rows(keys, [manifest], lambda ref: _fetched(source, ref)):
        parts.setdefault(state.key, []).append(plaintext)
    rows: dict[int, list[Tensor]] = {}
    for state in manifest.family.states:
        data = bytearray(b"".join(parts.pop(state.key)))
        dtype = getattr(torch, _NAMES[state.dtype])
        tensor = torch.frombuffer(data, dtype=dtype).reshape(-1, *state.dims[1:])
        rows.setdefault(state.key.layer, []).append(tensor)
    return Whole(saved, {layer: (pair[0], pair[1]) for layer, pair in rows.items()}, {})


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _put_beside(target: Storage, data: bytes, keys: Keys, *, encrypted: bool) -> None:
    """Ids are as secret as rows: where those are encrypted, so are these."""
    if not encrypted:
        target.replace(BESIDE, data)
        target.delete(SEALED)
        return
    seal = Seal.fresh()
    key = _beside_key(keys, seal, keys.active_epoch)
    sealed = encrypt(key, seal, data, header=_SEALED)
    target.replace(SEALED, b"".join(seal) + sealed)
    # of an export that was not encrypted
    target.delete(BESIDE)


def _beside(source: Storage, keys: Keys, *, epoch: int) -> bytes:
    if source.exists(BESIDE):
        return source.read(BESIDE, limit=DOCUMENT_NBYTES)
    data = source.read(SEALED, limit=DOCUMENT_NBYTES + SEAL_NBYTES + kvpack_limits.TAG_NBYTES)
    seal = Seal(data[:SALT_NBYTES], data[SALT_NBYTES:SEAL_NBYTES])
    if len(data) < SEAL_NBYTES:
        raise KvpackRejected(category="truncated", what=f"{SEALED} of {len(data)} bytes")
    key = _beside_key(keys, seal, epoch)
    return decrypt(key, seal, data[SEAL_NBYTES:], header=_SEALED)


def _beside_key(keys: Keys, seal: Seal, epoch: int) -> bytes:
    return hkdf(keys.epoch("manifest-encryption", epoch), salt=seal.salt, info=_SEALED)


def _check_expressible(whole: Whole) -> None:
    saved = whole.saved
    dtypes = {group.dtype for group in groups_of(saved).values()}
    problems = {
        "a session whose ids are known": saved.tokens is None,
        "a session that began at position 0": saved.first_position != 0,
        "a session that is not empty": saved.state.position == 0,
        "a session without states of other layers": bool(whole.states),
        f"rows of {', '.join(DTYPES)}": not dtypes <= set(DTYPES),
    }
    for expected, is_one in problems.items():
        if is_one:
            raise ArgumentError(argument="session", expected=expected, got=saved.name)


def _check_vouched(keys: Keys, manifest: Manifest, saved: SavedSession) -> None:
    codecs = {state.codec for state in manifest.family.states}
    codec = codecs.pop()
    if codecs or manifest.family != _family(saved, codec):
        raise PackMismatch(field="family", expected=manifest.family.id.hex(), got=BESIDE)
    if manifest.semantics != _semantics(saved):
        raise PackMismatch(field="semantics", expected=manifest.semantics.id.hex(), got=BESIDE)
    check_tokens(keys, manifest, saved.tokens or (), _inputs(saved))
    firsts = {
        layer: saved.state.groups[name].first
        for name, group in groups_of(saved).items()
        for layer in group.layers
    }
    for realized in manifest.schema.states:
        if realized.logical_start != firsts[realized.key.layer]:
            raise PackMismatch(
                field=f"first of {realized.key}",
                expected=realized.logical_start,
                got=firsts[realized.key.layer],
            )


def _family(saved: SavedSession, codec: Codec) -> Family:
    layers = {layer: group for group in groups_of(saved).values() for layer in group.layers}
    states = tuple(
        FamilyState(
            key=StateKey(layer, name),
            dtype=DTYPES[group.dtype],
            dims=(0, group.num_kv_heads, dim),
            codec=codec,
            rule=TokenAxis.DIRECT if group.sliding_window is None else TokenAxis.TAIL_WINDOW,
        )
        for layer, group in sorted(layers.items())
        for name, dim in (("attn.k", group.head_dim), ("attn.v", group.value_head_dim))
    )
    # rows of another order of summation, or of other layers, are other rows
    numerics = canonical([[stop, dict(numerics)] for stop, numerics in saved.state.numerics])
    return Family(
        engine_cache_abi=_id("engine-cache-abi", numerics, canonical(dict(saved.parts))),
        topology=_id("topology", canonical(dict(saved.geometry))),
        shard_map=_id("shard-map", b"one rank"),
        mode=Mode.PORTABLE,
        states=states,
    )


def _semantics(saved: SavedSession) -> Semantics:
    parts = dict(saved.parts)
    numerics = canonical([[stop, dict(numerics)] for stop, numerics in saved.state.numerics])
    told = canonical({"template": saved.template, "tokenizer": saved.tokenizer})
    weights = {name: parts[name] for name in ("config", "quantisation", "weights")}
    return Semantics(
        weights_config=_id("weights-config", canonical(weights)),
        adapters=_id("adapters", canonical({"adapters": parts["adapters"]})),
        tokenizer_template=_id("tokenizer-template", told),
        position_semantics=_id(
            "position-semantics",
            canonical({name: parts[name] for name in ("keys_rotated", "rotary")}),
        ),
        qualified_math=_id("qualified-math", numerics),
    )


def _id(name: str, *parts: bytes) -> bytes:
    digest = hashlib.sha256(f"kvplane/kvpack/{name}/1".encode() + b"\0")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _inputs(saved: SavedSession) -> list[Auxiliary]:
    return [
        Auxiliary(
            _id("auxiliary-kind", str(item[2]).encode()),
            _id("auxiliary", canonical(list(item))),
        )
        for item in saved.aux
    ]


def _spans(state: FamilyState, start: int, stop: int) -> tuple[ChunkSpan, ...]:
    wanted = FULL_TOKENS if state.rule is TokenAxis.DIRECT else WINDOW_TOKENS
    most = max(1, kvpack_limits.PLAINTEXT_NBYTES // state.token_nbytes)
    while wanted > most:
        wanted //= 2
    return grid_spans(state, start, stop, num_tokens=wanted)


def _tensor(whole: Whole, key: StateKey) -> Tensor:
    return whole.rows[key.layer][0 if key.name == "attn.k" else 1]


def _bytes(rows: Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def _chunk_file(ref: ChunkRef) -> str:
    return f"chunks/{ref.object_key.hex()}.kvchunk"


def _fetched(source: Storage, ref: ChunkRef) -> bytes:
    try:
        return source.read(_chunk_file(ref), limit=kvpack_limits.CHUNK_NBYTES)
    except StorageMissing as error:
        raise KvpackRejected(category="graph", what=f"no chunk {ref.object_key.hex()}") from error


def _the_pack(source: Storage, pack: str | None) -> str:
    if pack is not None:
        return Path(pack).name
    found = [name for name in source.list() if _PACK.fullmatch(name)]
    if len(found) != 1:
        expected = "one .kvpack file, or the name of one"
        raise ArgumentError(argument="pack", expected=expected, got=found)
    return found[0]
