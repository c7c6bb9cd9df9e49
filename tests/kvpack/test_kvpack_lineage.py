"""Packs that go on from others, and what names a text."""

from dataclasses import replace

import pytest
import suites

from kvplane.errors import KvpackRejected
from kvplane.kvpack import (
    Auxiliary,
    Delta,
    InputCut,
    check_lineage,
    check_tokens,
    input_cut,
    prefix_nodes,
)
from kvplane.kvpack.prefix import aux_root
from kvplane.kvpack.realize import check_schema


def stages():
    return [stage.manifest for stage in suites.delta_chain()]


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda _: [], "graph"),
        (lambda all_of: all_of[1:], "graph"),
        (lambda all_of: [all_of[0], all_of[2]], "graph"),
        (lambda all_of: [all_of[0], all_of[0]], "graph"),
        (lambda all_of: [all_of[0], all_of[1], all_of[1]], "graph"),
        (lambda all_of: [suites.fixture().manifest, all_of[1]], "graph"),
    ],
    ids=["none", "no full one", "one left out", "full twice", "delta twice", "another parent"],
)
def test_manifests_that_do_not_belong_together_are_refused(choose, expected):
    with pytest.raises(KvpackRejected) as refused:
        check_lineage(choose(stages()))

    assert expected == refused.value.category


def test_seven_deltas_are_a_chain_and_an_eighth_is_not():
    check_lineage(stages())
    last = stages()[-1]
    delta = Delta(depth=8, parent_manifest=last.id, parent_cut=last.cut)

    with pytest.raises(KvpackRejected, match="depth 8"):
        replace(last.schema, delta=delta).encoded()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_tokens": 8}, "a delta from 8 to 8"),
        ({"num_tokens": 0}, "a delta from 0 to 8"),
        ({"aux_root": b"x" * 32}, "auxiliary"),
    ],
    ids=["not smaller", "nothing", "other inputs"],
)
def test_a_delta_goes_on_from_less_of_the_same_text(changes, what):
    last = stages()[-1]
    parent = replace(last.schema.delta.parent_cut, **changes)
    schema = replace(last.schema, delta=replace(last.schema.delta, parent_cut=parent))

    with pytest.raises(KvpackRejected, match=what):
        check_schema(schema, last.family, last.cut)


def test_a_manifest_is_for_its_tokens_and_inputs_only():
    manifest = suites.fixture().manifest
    check_tokens(suites.keys(), manifest, [1, 2, 3, 4], suites.INPUTS)
    for tokens, inputs in (
        ([1, 2, 3, 5], suites.INPUTS),
        ([1, 2, 3], suites.INPUTS),
        ([1, 2, 3, 4], ()),
    ):
        with pytest.raises(KvpackRejected, match="another text"):
            check_tokens(suites.keys(), manifest, tokens, inputs)


def test_nodes_follow_from_what_comes_before_only():
    aux = aux_root(suites.keys())
    ids = {"semantic_id": b"m" * 32, "family_id": b"f" * 32, "aux": aux}
    tokens = list(range(600))
    nodes = list(prefix_nodes(suites.keys(), tokens, **ids))
    others = list(prefix_nodes(suites.keys(), [*tokens[:512], 7, 8], **ids))

    assert [(256, True), (512, True), (600, False)] == [(n.num_tokens, n.reusable) for n in nodes]
    assert nodes[:2] == others[:2]
    assert nodes[2] != others[2]


@pytest.mark.parametrize("tokens", [[], [-1], [1 << 32]], ids=["none", "negative", "33 bits"])
def test_tokens_that_have_no_cut_are_refused(tokens):
    with pytest.raises(KvpackRejected):
        input_cut(suites.keys(), tokens, semantic_id=b"m" * 32, family_id=b"f" * 32)


def test_an_input_of_zero_is_refused():
    with pytest.raises(KvpackRejected, match="all zero"):
        aux_root(suites.keys(), [Auxiliary(bytes(32), b"v" * 32)])


def test_a_cut_of_no_token_is_not_stored():
    with pytest.raises(KvpackRejected, match="without tokens"):
        InputCut(token_root=b"t" * 32, aux_root=b"a" * 32, num_tokens=0).check()
