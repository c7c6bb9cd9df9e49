"""kvpack v1, a public interchange format: every object of it, to bytes and back.

    keys, prefix            secrets, and what names a text
    family, schema          what a model's caches have in common; what one of them holds
    manifest, chunk, pack   one cut, its pieces, and the file that seals it
    identity, layouts       ids that two machines derive alike

The format is a draft; this is commit 268116a8 of it. It knows nothing of stores or tensors.
"""

from kvplane.kvpack.chunk import Chunk, Place, chunk_sidecar, decode_chunk, encode_chunk
from kvplane.kvpack.declaration import Declaration, decode_declaration
from kvplane.kvpack.family import Codec, DType, Family, FamilyState, Mode, TokenAxis, decode_family
from kvplane.kvpack.frame import decode_frame, encode_frame
from kvplane.kvpack.identity import ModelFacts, ScalarMath, domain_id, layer_groups
from kvplane.kvpack.keys import Keys, read_root
from kvplane.kvpack.layouts import LAYOUTS, MUSE_GLIMMER_30B
from kvplane.kvpack.manifest import ChunkRef, Manifest, Payload, Semantics, decode_manifest
from kvplane.kvpack.packfile import decode_pack, encode_pack
from kvplane.kvpack.prefix import Auxiliary, InputCut, input_cut, prefix_nodes
from kvplane.kvpack.realize import grid_spans, realize
from kvplane.kvpack.restore import check_lineage, check_tokens, read_rows
from kvplane.kvpack.schema import ChunkSpan, Delta, Schema, decode_schema
from kvplane.kvpack.seal import Seal
from kvplane.kvpack.sidecar import Sidecar, decode_sidecar
from kvplane.kvpack.wire import StateKey

DRAFT = "268116a8"

__all__ = [
    "DRAFT",
    "LAYOUTS",
    "MUSE_GLIMMER_30B",
    "Auxiliary",
    "Chunk",
    "ChunkRef",
    "ChunkSpan",
    "Codec",
    "DType",
    "Declaration",
    "Delta",
    "Family",
    "FamilyState",
    "InputCut",
    "Keys",
    "Manifest",
    "Mode",
    "ModelFacts",
    "Payload",
    "Place",
    "ScalarMath",
    "Schema",
    "Seal",
    "Semantics",
    "Sidecar",
    "StateKey",
    "TokenAxis",
    "check_lineage",
    "check_tokens",
    "chunk_sidecar",
    "decode_chunk",
    "decode_declaration",
    "decode_family",
    "decode_frame",
    "decode_manifest",
    "decode_pack",
    "decode_schema",
    "decode_sidecar",
    "domain_id",
    "encode_chunk",
    "encode_frame",
    "encode_pack",
    "grid_spans",
    "input_cut",
    "layer_groups",
    "prefix_nodes",
    "read_root",
    "read_rows",
    "realize",
]
