"""Memory of a real device: rings unrolled, growth under a graph, forks, everything returned."""

import gc

import pytest
import torch
from gpu_cases import REAL, history, same_bits

from kvplane import KVStore
from kvplane.errors import MemoryUnavailable
from kvplane.geometry import LayerGeometry, ModelGeometry
from kvplane.memory import mapped_cuda

pytestmark = pytest.mark.gpu
PAGE = 2 << 20


def layer(kind: str, window: int | None) -> LayerGeometry:
    return LayerGeometry(
        kind=kind, num_kv_heads=2, head_dim=128, value_head_dim=128, sliding_window=window
    )


GEOMETRY = ModelGeometry(
    layers=[layer("sliding_attention", 2048), layer("full_attention", None)], dtype="float16"
)


def taken(session, rows, first: int, counts: list[int]) -> list[torch.Tensor]:
    """Steps over a history; their outputs."""
    outs = []
    for count in filter(None, counts):
        with session.step(count) as step:
            for number in range(2):
                chunk = [part[0, first : first + count] for part in rows]
                outs.append(step.attend(number, *chunk))
        first += count
    return outs


def store(memory: str = "mapped", **options):
    return KVStore(GEOMETRY, max_context=131_072, device="cuda", memory=memory, **options)


def test_a_mapped_store_is_chosen_and_has_the_bits_of_one_on_the_heap():
    counts = [2000, 40, 1, 1, 512, 1, 700, 1, 1, 1]
    rows = history(REAL, sum(counts))
    outs = {}
    for memory in ("heap", "auto"):
        made = store(memory)
        outs[memory] = taken(made.open(), rows, 0, counts)
        if memory == "auto":
            assert made.describe().memory["backend"] == "mapped"
            assert made.describe().memory["unrolled"]
    assert all(same_bits(a, b) for a, b in zip(outs["heap"], outs["auto"], strict=True))


def test_a_rings_window_is_one_span_at_any_rotation():
    session = store().open()
    rows = history(REAL, 3000)
    taken(session, rows, 0, [1000] * 3)
    live = session.live(0)
    spans = session.spans(0, live.start, live.stop)

    assert len(spans) == 1
    assert same_bits(rows[1][0, live.start : live.stop], spans[0][0])
    query = torch.randn(1, 2, 1, 128, device="cuda", dtype=torch.float16)
    args = [part.transpose(0, 1)[None] for part in spans[0]]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert same_bits(sdpa(query, *args), sdpa(query, *(part.contiguous() for part in args)))


def test_pages_are_held_as_rows_are_and_everything_is_returned():
    made = store()
    driver = made.memory_choice.backend._driver
    given: list[object] = []
    create, release = driver.create, driver.release

    def created(num_pages: int) -> object:
        given.extend([create(num_pages)] * num_pages)
        return given[-1]

    def released(handle: object) -> None:
        given[:] = [each for each in given if each is not handle]
        release(handle)

    driver.create, driver.release = created, released
    session = made.open()
    assert made.memory().pages_held == 0
    rows = history(REAL, 2048)
    for number in range(5):
        taken(session, rows, 0, [2000])
        # a ring's one page; of the full plane those with rows, and at most one ahead
        pages = -(-2000 * (number + 1) // 2048)
        assert made.memory().pages_held // PAGE in {1 + pages, 2 + pages}
    assert len(given) * PAGE == made.memory().pages_held
    left = session.spans(1, 0, 10)
    session.close()
    assert made.memory().pages_held == 0
    assert float(left[0][0].float().abs().sum()) == 0
    del left, session
    session = made.open()
    taken(session, rows, 0, [2000])
    del session
    gc.collect()

    assert made.memory().pages_held == 0
    assert given == []
    del driver.create, driver.release


def test_a_graph_captured_before_growth_writes_into_pages_mapped_after():
    from kvplane.attention import triton_blocked
    from kvplane.attention.triton_cursors import advance, cursor_table, write_cursors

    session, other = store().open(), store("heap").open()
    rows = history(REAL, 4200)
    for each in (session, other):
        taken(each, rows, 0, [2040])
    full = next(group.id for group in session.groups if group.sliding_window is None)
    table = cursor_table([session.cursors[full]], "cuda")
    token = [part[:, 2040:2041].clone() for part in rows]

    def decoded() -> torch.Tensor:
        out = triton_blocked.decode(session.planes[1], table, *token, window=None, scale=REAL.scale)
        advance(table)
        return out

    # compiled before it is captured; the row is written again
    with session.step(1):
        decoded()
        session.open_step.abort()
    write_cursors(table, [session.cursors[full]])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoded()
    for position in range(2040, 4120):
        for place, part in zip(token, rows, strict=True):
            place.copy_(part[:, position : position + 1])
        with session.step(1) as step:
            graph.replay()
            step.written_on_device()
        if position in {2040, 2047, 2048, 3000, 4095, 4096}:
            taken(other, rows, other.position, [position - other.position])
            assert same_bits(taken(other, rows, position, [1])[-1][None], out)


def test_forks_share_pages_until_one_side_writes():
    made = store()
    session = made.open()
    rows = history(REAL, 2048)
    for _ in range(10):
        taken(session, rows, 0, [2000])
    pages = made.memory().pages_held // PAGE
    forks = [session.fork() for _ in range(3)]
    assert made.memory().pages_held // PAGE == pages + 3
    others = history(REAL, 16, seed=9)
    outs = [taken(each, others, 0, [1, 1, 1])[-1] for each in (session, *forks)]
    assert all(same_bits(outs[0], out) for out in outs)
    # each writer but the last copied the page that it wrote to
    assert made.memory().pages_held // PAGE == pages + 3 + 3
    taken(forks[0], history(REAL, 16, seed=10), 0, [4])
    assert all(
        same_bits(a, b)
        for a, b in zip(
            taken(forks[1], others, 4, [2]), taken(forks[2], others, 4, [2]), strict=True
        )
    )


def test_memory_that_cannot_be_had_is_an_error_that_changes_nothing():
    made = store()
    session = made.open()
    rows = history(REAL, 2048)
    taken(session, rows, 0, [1000])
    driver = made.memory_choice.backend._driver

    def refused(num_pages: int):
        del num_pages
        raise MemoryUnavailable("none")

    before = session.position
    driver.create = refused
    with pytest.raises(MemoryUnavailable):
        taken(session, rows, 0, [2000])
    del driver.create
    assert session.position == before
    taken(session, rows, 0, [2000])
    assert mapped_cuda.unavailable(torch.device("cuda")) is None
