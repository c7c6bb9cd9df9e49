"""Rows between a device and the host: the bits, at any rotation, in pieces."""

import pytest
import torch
from gpu_cases import same_bits

from kvplane import KVStore
from kvplane.geometry import LayerGeometry, ModelGeometry
from kvplane.kernels import staged

pytestmark = pytest.mark.gpu


def layer(kind: str, window: int | None) -> LayerGeometry:
    return LayerGeometry(
        kind=kind, num_kv_heads=2, head_dim=64, value_head_dim=32, sliding_window=window
    )


GEOMETRY = ModelGeometry(
    layers=[layer("sliding_attention", 100), layer("full_attention", None)], dtype="bfloat16"
)


def stepped(session, counts: list[int], seed: int) -> None:
    random = torch.Generator("cuda").manual_seed(seed)
    lead = () if session.batch is None else (session.batch,)
    for count in counts:
        with session.step(count) as step:
            for number in range(2):
                key, value = (
                    torch.randn(*lead, count, 2, dim, device="cuda", generator=random).bfloat16()
                    for dim in (64, 32)
                )
                step.write(number, key, value)


def rows(session) -> list[torch.Tensor]:
    found = []
    for number in range(2):
        live = session.live(number)
        spans = session.spans(number, live.start, live.stop)
        axis = 0 if session.batch is None else 1
        found += [torch.cat(parts, axis).cpu() for parts in zip(*spans, strict=True)]
    return found


@pytest.mark.parametrize("memory", ["heap", "mapped"])
@pytest.mark.parametrize("batch", [None, 3])
def test_a_session_goes_to_the_host_and_back_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, memory: str, batch: int | None
):
    # pieces of a few rows, so that there are many
    monkeypatch.setattr(staged, "PIECE_NBYTES", 3000)
    staged._buffer.cache_clear()
    store = KVStore(GEOMETRY, max_context=30_000, device="cuda", memory=memory)
    session = store.open(batch=batch)
    stepped(session, [70, 90, 1, 5], seed=1)
    wanted = rows(session)
    snapshot = session.snapshot()
    stepped(session, [9], seed=2)

    assert all(key.is_pinned() and value.is_pinned() for key, value in snapshot.rows.values())
    again = store.restore(snapshot)
    assert all(same_bits(a, b) for a, b in zip(wanted, rows(again), strict=True))
    stepped(again, [9], seed=2)
    assert all(same_bits(a, b) for a, b in zip(rows(session), rows(again), strict=True))
    # from memory that is not pinned
    for number, (key, value) in snapshot.rows.items():
        snapshot.rows[number] = (key.clone(), value.clone())
    assert not snapshot.rows[0][0].is_pinned()
    again = store.restore(snapshot)
    assert all(same_bits(a, b) for a, b in zip(wanted, rows(again), strict=True))
    staged._buffer.cache_clear()
