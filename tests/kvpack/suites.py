"""The published suites of kvpack v1, made again from their inputs."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from kvplane.kvpack.chunk import Chunk, Place, encode_chunk
from kvplane.kvpack.declaration import Declaration
from kvplane.kvpack.family import Codec, DType, Family, FamilyState
from kvplane.kvpack.frame import encode_frame
from kvplane.kvpack.keys import Keys
from kvplane.kvpack.manifest import Manifest, Payload, Semantics
from kvplane.kvpack.packfile import encode_pack
from kvplane.kvpack.prefix import Auxiliary, InputCut, input_cut
from kvplane.kvpack.realize import realize
from kvplane.kvpack.schema import ChunkSpan, Delta
from kvplane.kvpack.seal import Seal
from kvplane.kvpack.wire import StateKey

PUBLISHED = Path(__file__).parents[1] / "golden" / "kvpack-raw-plain.sha256"
KEY = StateKey(0, "attention.k")
SEMANTICS = Semantics(*(bytes([value]) * 32 for value in range(10, 15)))
INPUTS = (Auxiliary(bytes([20]) * 32, bytes([21]) * 32),)
PLAINTEXT = bytes(range(16))
STABLE = ("chunk-identity", "namespace", "prefix")
EPOCH = ("chunk-encryption", "manifest-auth", "manifest-encryption", "object-identity")


def run(first, count):
    return bytes(range(first, first + count))


def keys():
    return Keys(bytes([99]) * 32, tenant=bytes([1]) * 32, epoch=7)


def family(codec=Codec.RAW):
    state = FamilyState(key=KEY, dtype=DType.U8, dims=(0, 4), codec=codec)
    ids = (bytes([value]) * 32 for value in (2, 3, 4))
    return Family(
        **dict(zip(("engine_cache_abi", "topology", "shard_map"), ids, strict=True)),
        states=(state,),
    )


def cut(num_tokens, codec):
    return input_cut(
        keys(),
        range(1, num_tokens + 1),
        semantic_id=SEMANTICS.id,
        family_id=family(codec).id,
        inputs=INPUTS,
    )


class Stage(NamedTuple):
    manifest: Manifest
    chunk: Chunk
    pack: bytes
    plaintext: bytes
    place: Place


def stage(
    codec,
    plaintext,
    span,
    *,
    at: InputCut,
    delta: Delta | None = None,
    chunk_seal: Seal | None,
    pack_seal: Seal | None,
) -> Stage:
    mine = family(codec)
    schema = realize(mine, at, groups={KEY: 1}, spans=lambda *_: (span,), delta=delta)
    place = Place(family_id=mine.id, key=KEY, span=span, codec=codec)
    chunk = encode_chunk(keys(), place, plaintext, seal=chunk_seal)
    manifest = Manifest(
        tenant=keys().tenant,
        epoch=7,
        semantics=SEMANTICS,
        cut=at,
        family=mine,
        schema=schema,
        payload=(Payload(KEY, (chunk.ref,)),),
    )
    pack = encode_pack(keys(), manifest, seal=pack_seal)
    return Stage(manifest, chunk, pack, plaintext, place)


def fixture(codec=Codec.RAW, *, chunks_sealed=False, pack_sealed=False) -> Stage:
    return stage(
        codec,
        PLAINTEXT,
        ChunkSpan(0, 4, 0, 16),
        at=cut(4, codec),
        chunk_seal=Seal(run(0xA0, 16), run(0xB0, 12)) if chunks_sealed else None,
        pack_seal=Seal(run(0xC0, 16), run(0xD0, 12)) if pack_sealed else None,
    )


def delta_chain(codec=Codec.RAW, *, chunks_sealed=False, pack_sealed=False) -> list[Stage]:
    stages: list[Stage] = []
    for number in range(8):
        delta = None
        if stages:
            before = stages[-1].manifest
            delta = Delta(depth=number, parent_manifest=before.id, parent_cut=before.cut)
        seals = [
            Seal(run(first + number, 16), run(first + 0x20 + number, 12)) for first in (0x20, 0x60)
        ]
        stages.append(
            stage(
                codec,
                run(4 * number, 4),
                ChunkSpan(number, 1, 4 * number, 4),
                at=cut(number + 1, codec),
                delta=delta,
                chunk_seal=seals[0] if chunks_sealed else None,
                pack_seal=seals[1] if pack_sealed else None,
            )
        )
    return stages


def declaration():
    return Declaration(
        key=StateKey(7, "attention.k"),
        full_shape=(320, 4, 8),
        segment_shape=(64, 4, 8),
        strides=(32, 8, 1),
        logical_start=256,
        logical_count=64,
        absolute_position=320,
        atomic_group=9,
    )


def fixture_values(codec, *, chunks_sealed, pack_sealed):
    made = fixture(codec, chunks_sealed=chunks_sealed, pack_sealed=pack_sealed)
    mine = keys()
    values = {
        "state_declaration": declaration().encoded(),
        "family": made.manifest.family.encoded(),
        "schema": made.manifest.schema.encoded(),
        "manifest": made.manifest.encoded(),
        "raw_frame": encode_frame(Codec.RAW, PLAINTEXT),
        "lossless_frame": encode_frame(Codec.LOSSLESS, PLAINTEXT),
        "chunk": made.chunk.data,
        "pack": made.pack,
        "semantic_id": SEMANTICS.id,
        "family_id": made.manifest.family.id,
        "schema_id": made.manifest.schema.id,
        "manifest_id": made.manifest.id,
        "namespace_id": mine.namespace_id("tenant-alpha"),
        "token_root": made.manifest.cut.token_root,
        "auxiliary_root": made.manifest.cut.aux_root,
        "chunk_id": made.chunk.ref.content_id,
        "object_key": made.chunk.ref.object_key,
        "object_digest": made.chunk.ref.object_digest,
    }
    derived = {label: mine.stable(label) for label in STABLE}
    derived |= {label: mine.epoch(label, 7) for label in EPOCH}
    for label, value in sorted(derived.items()):
        values[f"key/{label.replace('-', '_')}"] = value
    return values


def chain_values(codec, *, chunks_sealed, pack_sealed):
    values = {}
    stages = delta_chain(codec, chunks_sealed=chunks_sealed, pack_sealed=pack_sealed)
    for number, made in enumerate(stages):
        values |= {
            f"stage-{number}/manifest": made.manifest.encoded(),
            f"stage-{number}/chunk": made.chunk.data,
            f"stage-{number}/pack": made.pack,
            f"stage-{number}/manifest-id": made.manifest.id,
            f"stage-{number}/plaintext": made.plaintext,
        }
    return values


def lines(codec, *, chunks_sealed, pack_sealed):
    """The suite as it was published: suite, name, bytes and digest, separated by tabs."""
    words = [codec.name.lower()]
    words += ["encrypted" if sealed else "plain" for sealed in (chunks_sealed, pack_sealed)]
    for kind, values in (("fixture", fixture_values), ("delta-chain", chain_values)):
        suite = "/".join([kind, *words])
        made = values(codec, chunks_sealed=chunks_sealed, pack_sealed=pack_sealed)
        for name, data in made.items():
            yield f"{suite}\t{name}\t{len(data)}\t{hashlib.sha256(data).hexdigest()}"
