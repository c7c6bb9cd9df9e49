"""What a manifest has to say given its family and cut; windows, groups, deltas, bounds."""

import tracemalloc
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import suites
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import KvpackRejected
from kvplane.kvpack import (
    ChunkSpan,
    Delta,
    DType,
    Family,
    FamilyState,
    Keys,
    Manifest,
    Mode,
    Payload,
    StateKey,
    TokenAxis,
    decode_family,
    decode_manifest,
    encode_chunk,
    encode_pack,
    grid_spans,
    input_cut,
    read_rows,
    realize,
)
from kvplane.kvpack.chunk import Place
from kvplane.kvpack.family import Layout
from kvplane.kvpack.realize import check_schema

SLIDING, FULL = StateKey(0, "attn.k"), StateKey(1, "attn.k")
IDS = {"engine_cache_abi": b"a" * 32, "topology": b"t" * 32, "shard_map": b"s" * 32}


def hybrid(**changes):
    states = (
        FamilyState(key=SLIDING, dtype=DType.F16, dims=(0, 2, 4), rule=TokenAxis.TAIL_WINDOW),
        FamilyState(key=FULL, dtype=DType.F16, dims=(0, 2, 4)),
    )
    return Family(**(IDS | {"mode": Mode.PORTABLE, "states": states} | changes))


def cut_of(family, tokens):
    return input_cut(suites.keys(), tokens, semantic_id=suites.SEMANTICS.id, family_id=family.id)


def realized(num_tokens, held, *, span=256):
    family = hybrid()
    cut = cut_of(family, range(num_tokens))
    schema = realize(
        family,
        cut,
        groups={SLIDING: 1, FULL: 2},
        tails={SLIDING: held},
        spans=lambda state, first, stop: grid_spans(state, first, stop, num_tokens=span),
    )
    return family, cut, schema


def rows_of(span):
    """Rows that say which token they are of."""
    return b"".join(
        token.to_bytes(4, "little") * (span.plaintext_nbytes // span.token_count // 4)
        for token in range(span.token_start, span.token_start + span.token_count)
    )


def written(num_tokens, held):
    family, cut, schema = realized(num_tokens, held)
    files, payload = {}, []
    for state, one in zip(family.states, schema.states, strict=True):
        refs = []
        for span in one.spans:
            place = Place(family_id=family.id, key=state.key, span=span, codec=state.codec)
            chunk = encode_chunk(suites.keys(), place, rows_of(span))
            files[chunk.ref.object_key] = chunk.data
            refs.append(chunk.ref)
        payload.append(Payload(state.key, tuple(refs)))
    manifest = Manifest(
        tenant=suites.keys().tenant,
        epoch=7,
        semantics=suites.SEMANTICS,
        cut=cut,
        family=family,
        schema=schema,
        payload=tuple(payload),
    )
    return manifest, files


def test_a_window_is_stored_as_a_compact_tail_at_absolute_offsets():
    _, _, schema = realized(700, 300)
    tail, full = schema.states

    assert (400, 300, 0) == (tail.logical_start, tail.logical_count, tail.physical_offset)
    assert ((300, 2, 4), (300, 2, 4)) == (tail.full_shape, tail.segment_shape)
    assert 300 * 16 == tail.physical_span == tail.complete_physical
    assert [(400, 112, 6400, 1792), (512, 188, 8192, 3008)] == [tuple(one) for one in tail.spans]
    assert (0, 700, 700 * 16) == (full.logical_start, full.logical_count, full.physical_span)


def test_neighbouring_checkpoints_share_all_whole_pieces_on_the_grid():
    before, files = written(1024, 512)
    after, more = written(1280, 512)

    # of the tail one piece of two is new; of the full state one of five
    assert 6 == len(files)
    assert 2 == len(more.keys() - files.keys())
    assert before.family == after.family


def test_rows_of_windows_and_of_all_come_back_at_their_tokens():
    manifest, files = written(700, 300)
    found = {SLIDING: b"", FULL: b""}
    for state, _, plaintext in read_rows(
        suites.keys(), [manifest], lambda ref: files[ref.object_key]
    ):
        found[state.key] += plaintext

    assert rows_of(ChunkSpan(400, 300, 0, 4800)) == found[SLIDING]
    assert rows_of(ChunkSpan(0, 700, 0, 11200)) == found[FULL]


@given(
    start=st.integers(0, 5000),
    count=st.integers(1, 3000),
    num_tokens=st.sampled_from([1, 256, 512]),
)
def test_pieces_are_cut_at_multiples_and_hold_every_token_once(start, count, num_tokens):
    state = hybrid().states[1]
    spans = grid_spans(state, start, start + count, num_tokens=num_tokens)

    covered = [(span.token_start, span.token_start + span.token_count) for span in spans]
    assert (start, start + count) == (covered[0][0], covered[-1][1])
    assert all(one[1] == two[0] and two[0] % num_tokens == 0 for one, two in pairwise(covered))
    assert all(span.plaintext_offset == 16 * span.token_start for span in spans)


def test_a_piece_of_more_than_four_mebibytes_is_refused():
    state = FamilyState(key=FULL, dtype=DType.F16, dims=(0, 2, 1024))

    with pytest.raises(KvpackRejected, match="longer than 4 MiB"):
        grid_spans(state, 0, 2048, num_tokens=2048)


@pytest.mark.parametrize("held", [0, 701])
def test_a_tail_is_of_at_least_one_token_and_at_most_all(held):
    with pytest.raises(KvpackRejected) as refused:
        realized(700, held)

    assert refused.value.category in {"semantics", "bounds"}


def test_a_family_with_windows_has_no_deltas():
    family, cut, schema = realized(700, 300)
    delta = Delta(depth=1, parent_manifest=b"p" * 32, parent_cut=replace(cut, num_tokens=256))

    with pytest.raises(KvpackRejected, match="tail window in a delta"):
        check_schema(replace(schema, delta=delta), family, cut)


FAMILY_CHANGES = {
    "an id of zero": ({"topology": bytes(32)}, "semantics"),
    "no pages": ({"page_size_tokens": 0}, "bounds"),
    "no state": ({"states": ()}, "bounds"),
    "states out of order": ({"states": hybrid().states[::-1]}, "semantics"),
}
STATE_CHANGES = {
    "two token axes": ({"dims": (0, 0)}, "semantics"),
    "the token axis elsewhere": ({"dims": (4, 0)}, "semantics"),
    "no dimension": ({"dims": ()}, "bounds"),
    "nine dimensions": ({"dims": (0, *[1] * 8)}, "bounds"),
    "elements past 64 bits": ({"dims": (0, 1 << 40, 1 << 40)}, "bounds"),
    "gathered": ({"rule": TokenAxis.GATHER}, "semantics"),
    "strided and portable": ({"layout": Layout.STRIDED}, "semantics"),
    "a need of itself": ({"dependencies": (FULL,)}, "graph"),
    "a need of nothing": ({"dependencies": (StateKey(9, "x"),)}, "graph"),
    "needs out of order": ({"dependencies": (FULL, SLIDING)}, "graph"),
    "too many needs": ({"dependencies": tuple(StateKey(n, "x") for n in range(65))}, "bounds"),
    "a name of nothing": ({"key": StateKey(1, "")}, "bounds"),
    "a long name": ({"key": StateKey(1, "x" * 256)}, "bounds"),
    "a name with NUL": ({"key": StateKey(1, "a\0b")}, "semantics"),
}


@pytest.mark.parametrize("name", [*FAMILY_CHANGES, *STATE_CHANGES])
def test_a_family_that_cannot_be_is_refused(name):
    if name in FAMILY_CHANGES:
        changes, expected = FAMILY_CHANGES[name]
        family = hybrid(**changes)
    else:
        changes, expected = STATE_CHANGES[name]
        first, second = hybrid().states
        family = hybrid(states=(first, replace(second, **changes)))
    with pytest.raises(KvpackRejected) as refused:
        family.encoded()

    assert expected == refused.value.category


def test_needs_in_a_circle_are_refused():
    first, second = hybrid().states
    circle = (replace(first, dependencies=(FULL,)), replace(second, dependencies=(SLIDING,)))

    with pytest.raises(KvpackRejected, match="circle"):
        hybrid(states=circle).encoded()


def state_change(number, **changes):
    def change(schema):
        states = list(schema.states)
        states[number] = replace(states[number], **changes)
        return replace(schema, states=tuple(states))

    return change


def spans_change(change):
    def apply(schema):
        spans = list(schema.states[1].spans)
        change(spans)
        return state_change(1, spans=tuple(spans))(schema)

    return apply


SCHEMA_CHANGES = {
    "a later start": (state_change(1, logical_start=1), "semantics"),
    "fewer tokens": (state_change(1, logical_count=699), "semantics"),
    "a tail elsewhere": (state_change(0, logical_start=300), "semantics"),
    "another position": (state_change(1, absolute_position=701), "semantics"),
    "another full shape": (state_change(1, full_shape=(701, 2, 4)), "semantics"),
    "another segment": (state_change(1, segment_shape=(699, 2, 4)), "semantics"),
    "other strides": (state_change(1, strides=(8, 8, 1)), "semantics"),
    "too few strides": (state_change(1, strides=(8, 4)), "semantics"),
    "another offset": (state_change(0, physical_offset=6400), "semantics"),
    "another span in memory": (state_change(1, physical_span=16), "semantics"),
    "another size in memory": (state_change(1, complete_physical=16), "semantics"),
    "another state": (state_change(1, key=StateKey(1, "attn.v")), "semantics"),
    "a gap": (spans_change(lambda spans: spans.pop(1)), "semantics"),
    "an end too early": (spans_change(lambda spans: spans.pop()), "semantics"),
    "twice": (spans_change(lambda spans: spans.insert(0, spans[0])), "semantics"),
    "an empty piece": (spans_change(lambda s: s.insert(0, ChunkSpan(0, 0, 0, 0))), "bounds"),
    "restored": (lambda schema: replace(schema, segment_restored=1), "semantics"),
    "restored in all": (lambda schema: replace(schema, complete_restored=1), "semantics"),
    "past 4 TiB": (lambda schema: replace(schema, complete_restored=1 << 43), "bounds"),
    "no pieces": (state_change(1, spans=()), "bounds"),
    "no groups": (lambda schema: replace(schema, groups=()), "bounds"),
    "a group of 0": (
        lambda schema: replace(schema, groups=(schema.groups[0]._replace(id=0), schema.groups[1])),
        "graph",
    ),
    "groups out of order": (lambda schema: replace(schema, groups=schema.groups[::-1]), "graph"),
    "a state in two groups": (
        lambda schema: replace(
            schema, groups=(schema.groups[0]._replace(members=(SLIDING, FULL)), schema.groups[1])
        ),
        "graph",
    ),
    "an empty group": (
        lambda schema: replace(
            schema, groups=(*schema.groups, schema.groups[1]._replace(id=3, members=()))
        ),
        "graph",
    ),
}


@pytest.mark.parametrize("name", SCHEMA_CHANGES)
def test_every_number_of_a_schema_follows_from_its_family_and_cut(name):
    change, expected = SCHEMA_CHANGES[name]
    family, cut, schema = realized(700, 300)
    with pytest.raises(KvpackRejected) as refused:
        check_schema(change(schema), family, cut)

    assert expected == refused.value.category


def test_a_manifest_of_another_tenant_is_not_written():
    other = Keys(bytes([99]) * 32, tenant=b"o" * 32, epoch=7)

    with pytest.raises(KvpackRejected, match="another tenant"):
        encode_pack(other, suites.fixture().manifest)


def test_a_count_takes_no_memory_before_its_bytes_are_there():
    family = suites.family().encoded()
    # the number of states, where bytes of one follow
    claims = family[:116] + (65_536).to_bytes(4, "little") + family[120:]
    manifest = bytearray(suites.fixture().manifest.encoded())
    tracemalloc.start()
    with pytest.raises(KvpackRejected):
        decode_family(claims)
    for offset in range(len(manifest) - 4):
        lie = manifest[:offset] + b"\xff\xff\x00\x00" + manifest[offset + 4 :]
        with suppress(KvpackRejected):
            decode_manifest(bytes(lie))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 200_000
