from dataclasses import replace

import pytest
import torch
from gpu_cases import Rows, Shape, error_of, exact, history, placed, same_bits
from torch import Tensor

from kvplane.plane import Layout
from kvplane.ring import RingCursor

pytestmark = pytest.mark.gpu

ERRORS = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


def decode(shape: Shape, plane: Rows, cursor: RingCursor, token: tuple[Tensor, ...], **more):
    from kvplane.attention import triton_blocked
    from kvplane.attention.triton_cursors import cursor_table

    table = cursor_table([cursor] * shape.batch, shape.device)
    more = {"window": shape.window, "scale": shape.scale, **more}
    return triton_blocked.decode(plane, table, *token, **more)


def token_at(rows: tuple[Tensor, ...], position: int) -> tuple[Tensor, ...]:
    return tuple(tensor[:, position : position + 1] for tensor in rows)


def expected(shape: Shape, rows: tuple[Tensor, ...], position: int, **more) -> Tensor:
    return exact(shape, rows, position, position + 1, **{"window": shape.window, **more})


def test_a_rings_bits_do_not_depend_on_rotation_or_layout(shape: Shape):
    rows = history(shape, max(shape.positions) + 1)
    for position in shape.positions:
        token = token_at(rows, position)
        outs = {}
        for layout in Layout:
            for rotation in (None, *shape.rotations):
                plane, cursor = placed(
                    shape,
                    rows[1:],
                    position,
                    capacity=shape.window,
                    rotation=rotation,
                    layout=layout,
                )
                out = decode(shape, plane, cursor, token)
                cursor.append(position)
                row = cursor.row_of(position)
                assert same_bits(token[1], plane.key[:, row : row + 1])
                assert same_bits(token[2], plane.value[:, row : row + 1])
                outs[layout, rotation] = out
        first = outs[Layout.TOKEN_MAJOR, None]

        assert error_of(first, expected(shape, rows, position)) < ERRORS[shape.dtype]
        assert [] == [name for name, out in outs.items() if not same_bits(first, out)]


def test_a_larger_plane_gives_the_same_bits(shape: Shape):
    rows = history(shape, max(shape.positions) + 1)
    position = max(shape.positions)
    token = token_at(rows, position)
    outs = []
    for capacity in (shape.window, shape.window + 37, position + 1, 2 * position):
        plane, cursor = placed(shape, rows[1:], position, capacity=capacity)
        outs.append(decode(shape, plane, cursor, token))

    assert [] == [out for out in outs[1:] if not same_bits(outs[0], out)]


def test_a_growing_planes_bits_do_not_depend_on_its_size_or_layout(shape: Shape):
    rows = history(shape, max(shape.positions) + 1)
    for position in shape.positions[1::2]:
        token = token_at(rows, position)
        outs = []
        for layout in Layout:
            for capacity in (position + 1, 3 * position):
                plane, cursor = placed(shape, rows[1:], position, capacity=capacity, layout=layout)
                outs.append(decode(shape, plane, cursor, token, window=None))

        wanted = expected(shape, rows, position, window=None)
        assert error_of(outs[0], wanted) < ERRORS[shape.dtype]
        assert [] == [out for out in outs[1:] if not same_bits(outs[0], out)]


def test_the_bits_do_not_depend_on_how_many_programs_share_a_sequence(shape: Shape):
    from kvplane.attention import triton_launch, triton_table
    from kvplane.attention.triton_cursors import cursor_table

    rows = history(shape, max(shape.positions) + 1)
    for window in (shape.window, None):
        sizes = triton_table.sizes_of(
            1, group=shape.group, head_dim=shape.head_dim, dtype=shape.dtype, window=window
        )
        for position in shape.positions[1::2]:
            outs = []
            for grain in (1, 4, 16):
                plane, cursor = placed(shape, rows[1:], position, capacity=window or position + 1)
                call = triton_launch.Call(
                    rule=triton_launch.Rule(window=window, scale=shape.scale),
                    stores=True,
                    sizes=replace(sizes, grain=grain),
                )
                table = cursor_table([cursor], shape.device)
                outs.append(triton_launch.run(plane, table, *token_at(rows, position), call=call))

            assert same_bits(outs[0], outs[1])
            assert same_bits(outs[0], outs[2])


def test_a_short_window_is_walked_whole_with_the_same_bits_everywhere(shape: Shape):
    from kvplane.attention.triton_blocked import decode_batch, plane_bases
    from kvplane.attention.triton_cursors import cursor_table

    some = shape.but(window=100)
    rows = history(some, 232)
    for position in (0, 99, 100, 231):
        token = token_at(rows, position)
        outs, planes, cursors = [], [], []
        for layout in Layout:
            for rotation in (None, 1, 77):
                plane, cursor = placed(
                    some, rows[1:], position, capacity=100, rotation=rotation, layout=layout
                )
                outs.append(decode(some, plane, cursor, token))
                row = cursor.copy().append(position)
                assert same_bits(token[2], plane.value[:, row : row + 1])
                if layout is Layout.HEAD_MAJOR:
                    planes.append(plane)
                    cursors.append(cursor)
        together = decode_batch(
            planes,
            cursor_table(cursors, some.device),
            *(part.repeat(3, 1, 1, 1) for part in token),
            bases=plane_bases(planes),
            window=100,
            scale=some.scale,
        )

        assert error_of(outs[0], expected(some, rows, position)) < ERRORS[some.dtype]
        assert same_bits(outs[0].repeat(3, 1, 1, 1), together)
        assert [] == [out for out in outs[1:] if not same_bits(outs[0], out)]


def test_a_sessions_bits_do_not_depend_on_its_neighbours(shape: Shape):
    from kvplane.attention.triton_blocked import decode_batch, plane_bases
    from kvplane.attention.triton_cursors import cursor_table

    for window in (shape.window, None):
        rows = history(shape, max(shape.positions) + 1)
        planes, cursors, alone, tokens = [], [], [], []
        for number, position in enumerate(shape.positions[::-1]):
            capacity = shape.window if window else max(shape.positions) + 1
            rotation = shape.rotations[number % len(shape.rotations)] if window else None
            token = token_at(rows, position)
            for copy in range(2):
                plane, cursor = placed(
                    shape, rows[1:], position, capacity=capacity, rotation=rotation
                )
                if copy:
                    alone.append(decode(shape, plane, cursor, token, window=window))
                    continue
                planes.append(plane)
                cursors.append(cursor)
                tokens.append(token)
        for count in (1, len(planes)):
            together = decode_batch(
                planes[:count],
                cursor_table(cursors[:count], shape.device),
                *(torch.cat(part) for part in zip(*tokens[:count], strict=True)),
                bases=plane_bases(planes[:count]),
                window=window,
                scale=shape.scale,
            )

            assert same_bits(torch.cat(alone[:count]), together)
        for plane, cursor, token in zip(planes, cursors, tokens, strict=True):
            row = cursor.append(cursor.next_position)
            assert same_bits(token[1], plane.key[:, row : row + 1])


def test_a_batch_in_lockstep_gives_each_sequence_its_own_bits(shape: Shape):
    batched = shape.but(batch=3)
    rows = history(batched, shape.window + 4)
    position = shape.window + 3
    token = token_at(rows, position)
    for layout in Layout:
        plane, cursor = placed(batched, rows[1:], position, capacity=shape.window, layout=layout)
        together = decode(batched, plane, cursor, token)
        for number in range(3):
            one = tuple(part[number : number + 1] for part in rows)
            plane, cursor = placed(shape, one[1:], position, capacity=shape.window, layout=layout)
            alone = decode(shape, plane, cursor, token_at(one, position))

            assert same_bits(alone, together[number : number + 1])


def test_softcap_and_sinks_and_other_heads_stay_within_the_error(shape: Shape):
    cases = [
        {"head_dim": 64, "value_dim": 64, "kv_heads": 3, "group": 2, "window": 128},
        {"head_dim": 96, "value_dim": 64, "kv_heads": 2, "group": 1, "window": None},
        {"head_dim": 192, "value_dim": 128, "kv_heads": 1, "group": 5, "window": 100},
        {"head_dim": 256, "value_dim": 256, "kv_heads": 1, "group": 4, "window": 512},
        {"head_dim": 128, "value_dim": 128, "kv_heads": 1, "group": 20, "window": None},
    ]
    for case in cases:
        window = case.pop("window")
        some = shape.but(**case)
        rows = history(some, 240)
        sinks = torch.randn(some.heads, generator=torch.Generator().manual_seed(3))
        plane, cursor = placed(some, rows[1:], 233, capacity=window or 250)
        token = token_at(rows, 233)
        out = decode(
            some, plane, cursor, token, window=window, softcap=5.0, sinks=sinks.to(some.device)
        )
        wanted = expected(some, rows, 233, window=window, softcap=5.0, sinks=sinks)

        assert error_of(out, wanted) < ERRORS[some.dtype], case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_stay_within_the_error(shape: Shape, dtype: torch.dtype):
    some = shape.but(dtype=dtype)
    position = shape.window + 3
    rows = history(some, position + 1)
    plane, cursor = placed(some, rows[1:], position, capacity=some.window, rotation=5)

    out = decode(some, plane, cursor, token_at(rows, position))

    assert error_of(out, expected(some, rows, position)) < ERRORS[dtype]


def test_physical_order_agrees_and_its_bits_depend_on_the_rotation(shape: Shape):
    rows = history(shape, 2 * shape.window + 2)
    position = 2 * shape.window + 1
    outs = []
    for rotation in (None, *shape.rotations, shape.window // 2):
        plane, cursor = placed(shape, rows[1:], position, capacity=shape.window, rotation=rotation)
        out = decode(shape, plane, cursor, token_at(rows, position), physical=True)
        row = cursor.append(position)

        assert error_of(out, expected(shape, rows, position)) < ERRORS[shape.dtype]
        assert same_bits(rows[1][:, position : position + 1], plane.key[:, row : row + 1])
        outs.append(out)

    assert any(not same_bits(outs[0], out) for out in outs[1:])


def test_cursors_advance_on_the_device_as_on_the_host(shape: Shape):
    from kvplane.attention.triton_cursors import advance, cursor_table, write_cursors

    random = torch.Generator().manual_seed(4)
    cursors = [
        RingCursor(capacity, origin_logical=first, origin_physical=row)
        for capacity, first, row in ((5, 0, 0), (7, 9, 4), (64, 2**40, 50), (1, 0, 0)) * 9
    ]
    table = cursor_table(cursors, shape.device)
    for _ in range(60):
        count = int(torch.randint(0, 12, (1,), generator=random))
        advance(table, count)
        for cursor in cursors:
            cursor.append_batch(cursor.next_position, count)

        assert [list(cursor.as_tuple()) for cursor in cursors] == table.tolist()
    write_cursors(table, cursors[::-1])
    assert [list(cursor.as_tuple()) for cursor in cursors[::-1]] == table.tolist()
