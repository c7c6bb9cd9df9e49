"""Ids of a model that a prefill machine and a decode machine derive from the same facts.

    domain_id(domain, parts) = SHA-256(domain | for each part: u64 length, part)

Valid bytes need only ids that are not zero. That two machines share rows needs these.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from kvplane.kvpack.family import DType, Family, FamilyState, Mode, TokenAxis
from kvplane.kvpack.layouts import STATE_NAMES, Layout
from kvplane.kvpack.manifest import Semantics
from kvplane.kvpack.wire import StateKey, u32, u64

LAST_LOGITS = "decoder.last_logits"
_DOMAIN = "kvpack/spark-prefill/"


def domain_id(name: str, *parts: bytes) -> bytes:
    """The id of some facts: 32 bytes."""
    digest = hashlib.sha256(f"{_DOMAIN}{name}".encode() + b"\0")
    for part in parts:
        digest.update(u64(len(part)) + part)
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarMath:
    """The scalars of Muse Glimmer's arithmetic that its weights' id is hashed with again."""

    qk_scale: float
    output_multiplier: float
    final_logit_softcap: float
    post_norm_eps: float

    def parts(self) -> tuple[bytes, ...]:
        """The bits of each, as float64."""
        values = (
            self.qk_scale,
            self.output_multiplier,
            self.final_logit_softcap,
            self.post_norm_eps,
        )
        return tuple(struct.pack("<d", value) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model and of both engines. Digests are SHA-256 of the files."""

    model_sha256: bytes
    model_revision: str
    weight_precision: str
    adapter_sha256: bytes
    tokenizer_sha256: bytes
    chat_template_sha256: bytes
    tokenizer_revision: str
    context_policy_sha256: bytes
    max_context: int
    producer_abi: str
    consumer_abi: str
    portable_abi: str
    compute_precision: str = "float16"
    kv_precision: str = "float16"
    scalar_math: ScalarMath | None = None
    transform: bytes = b""

    def semantics(self) -> Semantics:
        """The five ids of what the model computes."""
        weights = domain_id(
            "weights-config/v1",
            self.model_sha256,
            self.model_revision.encode(),
            self.weight_precision.encode(),
        )
        if self.scalar_math is not None:
            weights = domain_id("weights-config-scalar-math/v1", weights, *self.scalar_math.parts())
        return Semantics(
            weights_config=weights,
            adapters=domain_id("adapters/v1", self.adapter_sha256),
            tokenizer_template=domain_id(
                "tokenizer-template/v1",
                self.tokenizer_sha256,
                self.chat_template_sha256,
                self.tokenizer_revision.encode(),
            ),
            position_semantics=domain_id(
                "position-semantics/v1", self.context_policy_sha256, u32(self.max_context)
            ),
            qualified_math=domain_id(
                "qualified-math/v1",
                self.producer_abi.encode(),
                self.consumer_abi.encode(),
                self.compute_precision.encode(),
                self.kv_precision.encode(),
            ),
        )

    def family(self, layout: Layout, *, vocabulary: int | None = None) -> Family:
        """The portable family of a layout; `vocabulary` adds the last logits as a state."""
        states = []
        for layer in range(layout.num_layers):
            one = layout.class_of(layer)
            rule = TokenAxis.TAIL_WINDOW if one.window else TokenAxis.DIRECT
            states += [
                FamilyState(
                    key=StateKey(layer, name),
                    dtype=DType.F16,
                    dims=(0, one.num_kv_heads, one.head_dim),
                    rule=rule,
                )
                for name in STATE_NAMES
            ]
        if vocabulary is not None:
            states.append(
                FamilyState(
                    key=StateKey(layout.num_layers, LAST_LOGITS),
                    dtype=DType.F32,
                    dims=(0, vocabulary),
                    rule=TokenAxis.TAIL_WINDOW,
                )
            )
        return Family(
            engine_cache_abi=domain_id(
                "engine-cache-abi/v3",
                self.portable_abi.encode(),
                self.consumer_abi.encode(),
                layout.labelled_geometry(self.max_context),
                self.transform,
            ),
            topology=domain_id("topology/v2", layout.geometry(self.max_context)),
            shard_map=domain_id("shard-map/v2", b"single-rank-layout-table-declared-order"),
            mode=Mode.PORTABLE,
            states=tuple(states),
        )


def layer_groups(family: Family) -> Mapping[StateKey, int]:
    """The atomic group of every state: its layer's number and one."""
    return {state.key: state.key.layer + 1 for state in family.states}
