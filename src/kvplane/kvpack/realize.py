"""A schema against its family: what it has to say, given the cut.

`realize` is the writer's side: one schema follows from a family, a cut and where pieces are cut.
`check_schema` is the reader's: every number of a schema that was read follows from the same.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import prod

from kvplane.kvpack import limits
from kvplane.kvpack.family import Family, FamilyState, Layout, TokenAxis
from kvplane.kvpack.prefix import InputCut
from kvplane.kvpack.schema import ChunkSpan, Delta, Group, RealizedState, Schema
from kvplane.kvpack.wire import StateKey, check_ascending, reject


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor without gaps."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def footprint(shape: tuple[int, ...], strides: tuple[int, ...], *, width: int) -> int:
    """Bytes from a tensor's first element to its last."""
    return (sum((dim - 1) * step for dim, step in zip(shape, strides, strict=True)) + 1) * width


def grid_spans(
    state: FamilyState, start: int, stop: int, *, num_tokens: int = 2048
) -> tuple[ChunkSpan, ...]:
    """Pieces of [start, stop), cut at multiples of `num_tokens` counted from the first token ever.

    On the absolute grid neighbouring checkpoints share their pieces.

    Raises:
        KvpackRejected: a piece would be longer than 4 MiB.
    """
    nbytes = state.token_nbytes
    edges = [start, *range((start // num_tokens + 1) * num_tokens, stop, num_tokens), stop]
    spans = tuple(
        ChunkSpan(first, last - first, first * nbytes, (last - first) * nbytes)
        for first, last in pairwise(edges)
    )
    if any(span.plaintext_nbytes > limits.PLAINTEXT_NBYTES for span in spans):
        raise reject("bounds", f"{state.key}: {num_tokens} tokens are longer than 4 MiB")
    return spans


def realize(
    family: Family,
    cut: InputCut,
    *,
    groups: Mapping[StateKey, int],
    spans: Callable[[FamilyState, int, int], tuple[ChunkSpan, ...]] = grid_spans,
    tails: Mapping[StateKey, int] | None = None,
    delta: Delta | None = None,
) -> Schema:
    """The schema of a cut.

    Args:
        family: whose states they are.
        cut: the text.
        groups: the atomic group of every state, from 1.
        spans: where to cut pieces: given a state, the first token and the last but one.
        tails: the number of tokens held, of states that are tail windows.
        delta: what it goes on from, or None when it holds all.

    Raises:
        KvpackRejected: it cannot be expressed.
    """
    states = []
    for state in family.states:
        start = cut.num_tokens - _count(state, cut, delta, tails or {})
        states.append(_realized(state, cut.num_tokens, start, spans))
    members: dict[int, list[StateKey]] = {}
    for state in family.states:
        members.setdefault(groups[state.key], []).append(state.key)
    schema = Schema(
        states=tuple(states),
        groups=tuple(Group(number, tuple(members[number])) for number in sorted(members)),
        segment_restored=_restored(family, (state.segment_shape for state in states)),
        complete_restored=_restored(family, (state.full_shape for state in states)),
        delta=delta,
    )
    check_schema(schema, family, cut)
    return schema


def _count(
    state: FamilyState, cut: InputCut, delta: Delta | None, tails: Mapping[StateKey, int]
) -> int:
    if state.rule is TokenAxis.TAIL_WINDOW:
        return tails[state.key]
    return cut.num_tokens - (0 if delta is None else delta.parent_cut.num_tokens)


def _realized(
    state: FamilyState,
    cut: int,
    start: int,
    spans: Callable[[FamilyState, int, int], tuple[ChunkSpan, ...]],
) -> RealizedState:
    tail = state.rule is TokenAxis.TAIL_WINDOW
    segment = state.shape(cut - start)
    full = segment if tail else state.shape(cut)
    strides = row_major(full)
    width = state.dtype.nbytes
    return RealizedState(
        key=state.key,
        full_shape=full,
        segment_shape=segment,
        strides=strides,
        logical_start=start,
        logical_count=cut - start,
        physical_offset=0 if tail else start * strides[state.token_axis] * width,
        physical_span=footprint(segment, strides, width=width),
        complete_physical=footprint(full, strides, width=width),
        absolute_position=cut,
        spans=spans(state, start, cut),
    )


def _restored(family: Family, shapes: Iterator[tuple[int, ...]]) -> int:
    pairs = zip(family.states, shapes, strict=True)
    return sum(prod(shape) * state.dtype.nbytes for state, shape in pairs)


def check_schema(schema: Schema, family: Family, cut: InputCut) -> None:
    """Nothing, when every number follows from the family and the cut: KvpackRejected."""
    cut.check()
    schema.check()
    _check_delta(schema.delta, cut)
    if [state.key for state in schema.states] != [state.key for state in family.states]:
        raise reject("semantics", "schema: other states than the family's")
    for state, realized in zip(family.states, schema.states, strict=True):
        _check_state(state, realized, cut, schema.delta)
    for claimed, shapes, what in (
        (schema.segment_restored, (one.segment_shape for one in schema.states), "segment"),
        (schema.complete_restored, (one.full_shape for one in schema.states), "complete"),
    ):
        if claimed != _restored(family, shapes):
            raise reject("semantics", f"schema: {claimed} bytes restored ({what})")
    _check_groups(schema.groups, {state.key for state in family.states})


def _check_delta(delta: Delta | None, cut: InputCut) -> None:
    if delta is None:
        return
    parent = delta.parent_cut
    if not 1 <= parent.num_tokens < cut.num_tokens:
        raise reject("semantics", f"a delta from {parent.num_tokens} to {cut.num_tokens}")
    if parent.aux_root != cut.aux_root:
        raise reject("semantics", "a delta over other auxiliary inputs than its parent's")
    if not any(delta.parent_manifest):
        raise reject("semantics", "a delta of no manifest")


def _check_state(
    state: FamilyState, realized: RealizedState, cut: InputCut, delta: Delta | None
) -> None:
    tokens, start, count = cut.num_tokens, realized.logical_start, realized.logical_count
    tail = state.rule is TokenAxis.TAIL_WINDOW
    if tail and delta is not None:
        raise reject("semantics", f"{state.key}: a tail window in a delta")
    if tail:
        fits = 1 <= count <= tokens and start == tokens - count
    else:
        first = 0 if delta is None else delta.parent_cut.num_tokens
        fits = (start, count) == (first, tokens - first)
    if not fits:
        raise reject("semantics", f"{state.key}: tokens from {start}, {count} of them")
    if realized.absolute_position != tokens:
        raise reject("semantics", f"{state.key}: position {realized.absolute_position}")
    segment = state.shape(count)
    full = segment if tail else state.shape(tokens)
    if (realized.full_shape, realized.segment_shape) != (full, segment):
        raise reject("semantics", f"{state.key}: shapes that are not those of its tokens")
    _check_memory(state, realized)
    _check_spans(state, realized)


def _check_memory(state: FamilyState, realized: RealizedState) -> None:
    strides, width = realized.strides, state.dtype.nbytes
    if len(strides) != len(realized.full_shape):
        raise reject("semantics", f"{state.key}: {len(strides)} strides")
    if state.layout is Layout.CONTIGUOUS and strides != row_major(realized.full_shape):
        raise reject("semantics", f"{state.key}: strides {strides}")
    tail = state.rule is TokenAxis.TAIL_WINDOW
    expected = (
        0 if tail else realized.logical_start * strides[state.token_axis] * width,
        footprint(realized.segment_shape, strides, width=width),
        footprint(realized.full_shape, strides, width=width),
    )
    got = (realized.physical_offset, realized.physical_span, realized.complete_physical)
    if expected != got:
        raise reject("semantics", f"{state.key}: bytes {got}, its shapes say {expected}")


def _check_spans(state: FamilyState, realized: RealizedState) -> None:
    at = realized.logical_start
    nbytes = state.token_nbytes
    for span in realized.spans:
        if span.token_count < 1 or span.plaintext_nbytes > limits.PLAINTEXT_NBYTES:
            raise reject("bounds", f"{state.key}: a piece of {span.plaintext_nbytes} bytes")
        expected = (at, span.token_count, at * nbytes, span.token_count * nbytes)
        if span != expected:
            raise reject("semantics", f"{state.key}: piece {tuple(span)}, expected {expected}")
        at += span.token_count
    if at != realized.logical_start + realized.logical_count:
        raise reject("semantics", f"{state.key}: pieces end at {at}")


def _check_groups(groups: tuple[Group, ...], family: set[StateKey]) -> None:
    before, seen = 0, 0
    for group in groups:
        if group.id <= before:
            raise reject("graph", f"group {group.id} after {before}")
        before = group.id
        check_ascending(group.members, what=f"group {group.id}", category="graph")
        if not group.members:
            raise reject("graph", f"group {group.id} has no state")
        seen += len(group.members)
    members = {key for group in groups for key in group.members}
    if seen != len(members) or members != family:
        raise reject("graph", "groups do not hold each state once")
