"""Ids that two machines derive alike, of the registered model."""

import hashlib
import struct
from dataclasses import replace

import pytest

from kvplane.errors import ArgumentError
from kvplane.kvpack import (
    LAYOUTS,
    MUSE_GLIMMER_30B,
    DType,
    Mode,
    ModelFacts,
    ScalarMath,
    StateKey,
    TokenAxis,
    layer_groups,
)

FACTS = ModelFacts(
    model_sha256=b"m" * 32,
    model_revision="r1",
    weight_precision="bf16",
    adapter_sha256=b"a" * 32,
    tokenizer_sha256=b"t" * 32,
    chat_template_sha256=b"c" * 32,
    tokenizer_revision="t1",
    context_policy_sha256=b"p" * 32,
    max_context=131_072,
    producer_abi="producer-1",
    consumer_abi="consumer-1",
    portable_abi="portable-2",
)


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


def said(name, *parts):
    """The rule as it is written down."""
    framed = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hashlib.sha256(b"kvpack/spark-prefill/" + name + b"\0" + framed).digest()


def test_the_registered_model_has_its_39_windows_and_13_full_layers():
    family = FACTS.family(MUSE_GLIMMER_30B, vocabulary=1000)
    rules = [state.rule for state in family.states]

    assert {"muse-glimmer-30b": MUSE_GLIMMER_30B} == LAYOUTS
    assert 105 == len(family.states)
    assert (78 + 1, 26) == (rules.count(TokenAxis.TAIL_WINDOW), rules.count(TokenAxis.DIRECT))
    assert [3, 7, 11] == [
        layer for layer in range(12) if not MUSE_GLIMMER_30B.class_of(layer).window
    ]
    assert (Mode.PORTABLE, 256) == (family.mode, family.page_size_tokens)


def test_states_are_ordered_by_layer_then_keys_before_values():
    states = FACTS.family(MUSE_GLIMMER_30B, vocabulary=1000).states

    assert [StateKey(0, "attn.k"), StateKey(0, "attn.v"), StateKey(1, "attn.k")] == [
        state.key for state in states[:3]
    ]
    assert {((0, 2, 128), DType.F16)} == {(state.dims, state.dtype) for state in states[:-1]}
    assert (StateKey(52, "decoder.last_logits"), (0, 1000), DType.F32) == (
        states[-1].key,
        states[-1].dims,
        states[-1].dtype,
    )


def test_a_layers_states_are_one_group_numbered_from_one():
    family = FACTS.family(MUSE_GLIMMER_30B, vocabulary=1000)
    groups = layer_groups(family)

    assert (1, 1, 53) == (
        groups[StateKey(0, "attn.k")],
        groups[StateKey(0, "attn.v")],
        groups[StateKey(52, "decoder.last_logits")],
    )
    assert 53 == len(set(groups.values()))


def test_the_family_is_hashed_from_its_table_as_the_rule_says():
    names = u32(2, 6) + b"attn.k" + u32(6) + b"attn.v"
    exceptions = tuple(range(3, 52, 4))
    windowed, full = u32(0, 52, 1, 2, 128, 2048, *exceptions), u32(3, 52, 4, 2, 128, 0)
    labelled = windowed + u32(12) + b"gqa-windowed" + names + struct.pack("<d", 500000.0)
    labelled += u32(128, 4) + b"none" + u32(11) + b"interleaved"
    labelled += full + u32(8) + b"gqa-full" + names + struct.pack("<d", 0.0)
    labelled += u32(0, 4) + b"none" + u32(4) + b"none" + u32(131_072)
    family = FACTS.family(MUSE_GLIMMER_30B)

    assert family.engine_cache_abi == said(
        b"engine-cache-abi/v3", b"portable-2", b"consumer-1", labelled, b""
    )
    assert family.topology == said(b"topology/v2", windowed + full + u32(131_072))
    assert family.shard_map == said(b"shard-map/v2", b"single-rank-layout-table-declared-order")


def test_semantics_are_hashed_from_the_facts_as_the_rule_says():
    found = FACTS.semantics()

    assert found.weights_config == said(b"weights-config/v1", b"m" * 32, b"r1", b"bf16")
    assert found.adapters == said(b"adapters/v1", b"a" * 32)
    assert found.tokenizer_template == said(b"tokenizer-template/v1", b"t" * 32, b"c" * 32, b"t1")
    assert found.position_semantics == said(b"position-semantics/v1", b"p" * 32, u32(131_072))
    assert found.qualified_math == said(
        b"qualified-math/v1", b"producer-1", b"consumer-1", b"float16", b"float16"
    )


def test_the_models_scalars_are_hashed_over_the_weights():
    math = ScalarMath(
        qk_scale=0.5, output_multiplier=2.0, final_logit_softcap=30.0, post_norm_eps=1e-5
    )
    bits = [struct.pack("<d", value) for value in (0.5, 2.0, 30.0, 1e-5)]
    prior = FACTS.semantics()
    found = replace(FACTS, scalar_math=math).semantics()

    assert found.weights_config == said(
        b"weights-config-scalar-math/v1", prior.weights_config, *bits
    )
    assert prior[1:] == found[1:]


@pytest.mark.parametrize(
    "changes",
    [
        {"consumer_abi": "consumer-2"},
        {"portable_abi": "portable-3"},
        {"max_context": 65_536},
        {"transform": b"x" * 32},
    ],
    ids=lambda one: next(iter(one)),
)
def test_whatever_a_caches_bytes_depend_on_is_another_family(changes):
    assert (
        FACTS.family(MUSE_GLIMMER_30B).id != replace(FACTS, **changes).family(MUSE_GLIMMER_30B).id
    )


def test_another_rotary_base_is_another_family_of_the_same_topology():
    first, second = MUSE_GLIMMER_30B.classes
    other = replace(MUSE_GLIMMER_30B, classes=(replace(first, rotary_base=10_000.0), second))
    one, two = FACTS.family(MUSE_GLIMMER_30B), FACTS.family(other)

    assert one.engine_cache_abi != two.engine_cache_abi
    assert one.topology == two.topology


def test_a_layer_of_no_class_is_refused():
    with pytest.raises(ArgumentError, match="muse-glimmer-30b"):
        MUSE_GLIMMER_30B.class_of(52)
