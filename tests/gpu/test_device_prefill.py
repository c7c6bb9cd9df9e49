import pytest
import torch
from gpu_cases import SMALL, Rows, Shape, error_of, exact, history, placed, same_bits
from torch import Tensor

from kvplane.errors import ArgumentError
from kvplane.plane import Layout
from kvplane.ring import RingCursor

pytestmark = pytest.mark.gpu


def prefill(
    shape: Shape, plane: Rows, cursor: RingCursor, rows: tuple[Tensor, ...], count: int, **more
) -> Tensor:
    """A chunk's outputs; its rows are stored and the cursor moves on."""
    from kvplane.attention import triton_blocked

    window = more.pop("window", shape.window)
    first = cursor.next_position
    oldest = max(cursor.origin_logical, 0 if window is None else first - (window - 1))
    before = cursor.copy()
    source = cursor.append_batch(first, count)
    seen = triton_blocked.Cursor(
        first_query=first,
        first_key=oldest,
        origin_row=before.row_of(oldest) if oldest < first else 0,
        seam=cursor.capacity,
    )
    return triton_blocked.prefill(
        plane,
        seen,
        *(tensor[:, first : first + count] for tensor in rows),
        runs=cursor.rows_of(first + source.source_first, first + count),
        window=window,
        scale=shape.scale,
        **more,
    )


def expected(shape: Shape, rows: tuple[Tensor, ...], first: int, stop: int, **more) -> Tensor:
    return exact(shape, rows, first, stop, **{"window": shape.window, **more})


def test_a_chunk_over_a_wrapped_ring_gives_the_same_bits_at_every_rotation(shape: Shape):
    first, count = shape.window + 7, shape.chunk
    rows = history(shape, first + count)
    outs = []
    for layout in Layout:
        for rotation in (None, *shape.rotations):
            plane, cursor = placed(
                shape,
                rows[1:],
                first,
                capacity=shape.window,
                rotation=rotation,
                layout=layout,
            )
            outs.append(prefill(shape, plane, cursor, rows, count))
            held = torch.cat([plane.key[:, run.start : run.stop] for run in live(cursor)], 1)
            assert same_bits(rows[1][:, cursor.origin_logical : first + count], held)

    assert error_of(outs[0], expected(shape, rows, first, first + count)) < 1e-3
    assert [] == [number for number, out in enumerate(outs) if not same_bits(outs[0], out)]


def live(cursor: RingCursor) -> list[range]:
    return cursor.rows_of(cursor.origin_logical, cursor.next_position)


def test_every_query_of_a_chunk_is_within_the_error(shape: Shape):
    for window in (shape.window, None):
        for first, count in ((0, shape.chunk), (33, shape.chunk + 3)):
            rows = history(shape, first + count, seed=first)
            plane, cursor = placed(shape, rows[1:], first, capacity=window or first + count)
            out = prefill(shape, plane, cursor, rows, count, window=window)
            wanted = expected(shape, rows, first, first + count, window=window)

            assert error_of(out, wanted) < 1e-3
            worst = (out.double() - wanted).abs().amax()
            assert float(worst) < 1e-2


def test_a_query_of_many_has_the_same_bits_however_the_chunk_was_cut(shape: Shape):
    count = 2 * 65 + 21
    rows = history(shape, shape.window + count)
    for window in (shape.window, None):
        outs = []
        for cuts in ((count,), (65, count - 65), (count - 67, 67)):
            plane, cursor = placed(
                shape, rows[1:], shape.window, capacity=window or shape.window + count
            )
            parts = [prefill(shape, plane, cursor, rows, cut, window=window) for cut in cuts]
            outs.append(torch.cat(parts, 1))

        assert same_bits(outs[0], outs[1])
        assert same_bits(outs[0], outs[2])


def test_a_query_of_a_few_has_the_same_bits_however_few_they_are(shape: Shape):
    # the oldest key that the fourth query sees begins a split, and not that of its tile
    count = 7
    rows = history(shape, shape.window + 60 + count)
    for window in (shape.window, None):
        outs = []
        for cuts in ((count,), (2, 5), (3, 4)):
            first = shape.window + 60
            plane, cursor = placed(
                shape, rows[1:], first, capacity=window or first + count, rotation=window and 1
            )
            parts = [prefill(shape, plane, cursor, rows, cut, window=window) for cut in cuts]
            outs.append(torch.cat(parts, 1))

        first = shape.window + 60
        wanted = expected(shape, rows, first, first + count, window=window)
        assert error_of(outs[0], wanted) < 1e-3
        assert [] == [number for number, out in enumerate(outs) if not same_bits(outs[0], out)]


def test_softcap_and_sinks_reach_the_queries_of_a_chunk(shape: Shape):
    some = shape.but(kv_heads=2, group=4, head_dim=64, value_dim=96, window=50, batch=2)
    rows = history(some, 20 + 70)
    sinks = torch.randn(some.heads, generator=torch.Generator().manual_seed(3))
    for count in (70, 5):
        plane, cursor = placed(some, rows[1:], 20, capacity=50, layout=Layout.HEAD_MAJOR)
        out = prefill(some, plane, cursor, rows, count, softcap=3.0, sinks=sinks.to(some.device))
        wanted = expected(some, rows, 20, 20 + count, softcap=3.0, sinks=sinks)

        assert error_of(out, wanted) < 1e-3


def test_runs_and_a_stored_chunk_give_the_bits_of_a_chunk_beside_them(shape: Shape):
    from kvplane.attention import triton_blocked

    first = shape.window + 5
    for count in (1, 3, 70):
        rows = history(shape, first + count)
        capacity = shape.window + 80
        plane, cursor = placed(shape, rows[1:], first, capacity=capacity, rotation=capacity - 30)
        after = cursor.copy()
        after.append_batch(first, count)
        oldest = first - (shape.window - 1)
        rule = {"window": shape.window, "scale": shape.scale}
        apart = triton_blocked.attend(
            plane,
            cursor.rows_of(oldest, first),
            *(tensor[:, first:] for tensor in rows),
            first_key=oldest,
            first_query=first,
            **rule,
        )
        prefill(shape, plane, cursor, rows, count)
        stored = triton_blocked.attend(
            plane,
            after.rows_of(oldest, first + count),
            rows[0][:, first:],
            None,
            None,
            first_key=oldest,
            first_query=first,
            **rule,
        )

        assert same_bits(apart, stored)


def test_queries_without_their_keys_and_impossible_rules_are_refused(shape: Shape):
    from kvplane.attention import triton_blocked

    rows = history(shape, 12)
    plane, _ = placed(shape, rows[1:], 10, capacity=32)
    query = rows[0][:, 10:]
    rule = {"first_key": 0, "window": None, "scale": 1.0}

    with pytest.raises(ArgumentError, match="queries within"):
        triton_blocked.attend(plane, [range(10)], query, None, None, first_query=10, **rule)
    with pytest.raises(ArgumentError, match="first_query"):
        triton_blocked.attend(
            plane, [range(10)], query, rows[1][:, 10:], rows[2][:, 10:], first_query=9, **rule
        )
    with pytest.raises(ArgumentError, match="scale"):
        triton_blocked.attend(
            plane, [range(12)], query, None, None, first_query=10, **{**rule, "scale": -1.0}
        )
    with pytest.raises(ArgumentError, match="runs"):
        triton_blocked.attend(
            plane, [range(6), range(20, 26)], query, None, None, first_query=10, **rule
        )


def test_what_outputs_are_compared_with_is_the_reference():
    from kvplane.attention import reference

    some = SMALL.but(batch=2)
    rows = history(some, 40)
    sinks = torch.randn(some.heads, generator=torch.Generator().manual_seed(3))
    for window in (9, None):
        more = {"window": window, "softcap": 2.0, "sinks": sinks}
        wanted = reference.attend(
            Rows(*(part.double() for part in rows[1:])),
            [range(40)],
            rows[0][:, 30:].double(),
            None,
            None,
            first_key=0,
            first_query=30,
            scale=some.scale,
            **more,
        )

        assert error_of(exact(some, rows, 30, 40, **more), wanted) < 1e-12
