"""What the interpreter cannot show: whole stores on a device, graphs, races, 64-bit addresses."""

import pytest
import torch
from gpu_cases import REAL, Rows, Shape, error_of, exact, history, placed, same_bits
from torch import Tensor

from kvplane.geometry import LayerGeometry, ModelGeometry
from kvplane.plane import Layout

pytestmark = pytest.mark.gpu


def layer(kind: str, window: int | None) -> LayerGeometry:
    return LayerGeometry(
        kind=kind, num_kv_heads=2, head_dim=128, value_head_dim=128, sliding_window=window
    )


@pytest.mark.parametrize("layout", list(Layout))
def test_addresses_past_32_bits_reach_their_rows(layout: Layout):
    from kvplane.attention import triton_blocked
    from kvplane.kernels.triton_rows import gather_rows, store_rows

    # 65 sessions of 131,072 rows of 256 numbers: the last begins past 2^31 elements of keys
    shape = REAL.but(batch=65)
    rows = 131072
    planes = []
    for _ in range(2):
        sizes = (65, 2, rows, 128) if layout is Layout.HEAD_MAJOR else (65, rows, 2, 128)
        tensor = torch.zeros(sizes, dtype=torch.float16, device="cuda")
        planes.append(tensor.transpose(1, 2) if layout is Layout.HEAD_MAJOR else tensor)
    plane = Rows(*planes)
    filled = history(REAL.but(batch=1), 3000, seed=5)
    last = Rows(plane.key[-1:], plane.value[-1:])
    first = rows - 3000
    at = torch.arange(first, rows, device="cuda")
    store_rows(last, at, *filled[1:])
    assert same_bits(filled[1], plane.key[-1:, first:])
    assert same_bits(filled[2], gather_rows(plane, at)[1][-1:])

    token = [part[:, -1:].expand(65, -1, -1, -1) for part in filled]
    cursor = triton_blocked.Cursor(
        first_query=rows - 1, first_key=first, origin_row=first, seam=rows
    )
    out = triton_blocked.decode(plane, cursor, *token, window=None, scale=shape.scale)
    wanted = exact(REAL, filled, 2999, 3000, window=None)

    assert error_of(out[-1:], wanted) < 1e-3


def test_one_graph_serves_a_ring_past_its_wrap_and_a_growing_plane():
    from kvplane.attention import triton_blocked
    from kvplane.attention.triton_cursors import advance, cursor_table

    for window in (REAL.window, None):
        start, steps = 2000, 120
        rows = history(REAL, start + steps)
        capacity = window or 8192
        plane, cursor = placed(REAL, rows[1:], start, capacity=capacity)
        other, mirror = placed(REAL, rows[1:], start, capacity=capacity)
        table = cursor_table([cursor], "cuda")
        token = [part[:, start : start + 1].clone() for part in rows]
        rule = {"window": window, "scale": REAL.scale}
        # compiled before it is captured; the same row is written again
        triton_blocked.decode(plane, table, *token, **rule)
        advance(cursor_table([cursor], "cuda"))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = triton_blocked.decode(plane, table, *token, **rule)
            advance(table)
        for step in range(start, start + steps):
            for place, part in zip(token, rows, strict=True):
                place.copy_(part[:, step : step + 1])
            graph.replay()
            eager = triton_blocked.decode(other, cursor_table([mirror], "cuda"), *token, **rule)
            mirror.append(step)

            assert same_bits(eager, out)
        assert [list(mirror.as_tuple())] == table.tolist()
        assert same_bits(other.key, plane.key)


def test_a_ring_wrapped_a_thousand_times_beside_busy_streams_holds_its_rows():
    from kvplane.attention import triton_blocked

    count = 512
    rows = history(REAL, REAL.window + count)
    busy, side = torch.cuda.Stream(), torch.cuda.Stream()
    heat = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
    outs: list[list[Tensor]] = []
    for crowded in (False, True):
        plane, cursor = placed(REAL, rows[1:], 0, capacity=REAL.window)
        kept, exports = [], []
        for turn in range(1000):
            first = cursor.next_position
            oldest = max(0, first - (REAL.window - 1))
            before = cursor.copy()
            cursor.append_batch(first, count)
            begin = turn % REAL.window
            chunk = [part[:, begin : begin + count] for part in rows]
            if crowded:
                with torch.cuda.stream(busy):
                    heat @ heat
            out = triton_blocked.prefill(
                plane,
                triton_blocked.Cursor(
                    first_query=first,
                    first_key=oldest,
                    origin_row=before.row_of(oldest) if first else 0,
                    seam=REAL.window,
                ),
                *chunk,
                runs=cursor.rows_of(first, first + count),
                window=REAL.window,
                scale=REAL.scale,
            )
            kept.append(out.view(torch.int16).long().sum())
            if turn % 100 == 99:
                # an export at once, on another stream, that waits for the append alone
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    exports.append(plane.key.clone())
                torch.cuda.current_stream().wait_stream(side)
                last = cursor.rows_of(first, first + count)
                held = torch.cat([exports[-1][:, run.start : run.stop] for run in last], 1)
                assert same_bits(chunk[1], held)
        outs.append([torch.stack(kept), *exports])

    assert [] == [n for n, (a, b) in enumerate(zip(*outs, strict=True)) if not same_bits(a, b)]


def test_a_store_on_a_gpu_says_so_and_agrees_with_one_on_the_cpu():
    from kvplane.store import KVStore

    geometry = ModelGeometry(
        layers=[layer("sliding_attention", 64), layer("full_attention", None)], dtype="float16"
    )
    outs = {}
    for device in ("cpu", "cuda"):
        store = KVStore(geometry, max_context=512, device=device)
        assert store.numerics["kernel"] == ("torch" if device == "cpu" else "triton")
        session = store.open()
        shape: Shape = REAL.but(device="cpu")
        rows = history(shape, 200)
        parts = []
        first = 0
        for count in (70, 1, 1, 5, 90, 1, 30, 1, 1):
            with session.step(list(range(first, first + count))) as step:
                for number in range(2):
                    chunk = [part[0, first : first + count].to(device) for part in rows]
                    parts.append(step.attend(number, *chunk).cpu())
            first += count
        outs[device] = torch.cat([part.flatten() for part in parts])
        outs[f"{device} rows"] = torch.cat(
            [part.cpu() for part, _ in session.spans(0, 200 - 64, 200)]
        )

    assert same_bits(outs["cpu rows"], outs["cuda rows"])
    assert error_of(outs["cuda"], outs["cpu"]) < 1e-3
