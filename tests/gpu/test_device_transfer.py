"""A session moves between planes of a device and of the machine, in every pair of layouts."""

import threading

import pytest
import torch
from gpu_cases import Shape

from kvplane import KVStore, Layout, ModelGeometry
from kvplane.transfer import memory_links, receive, send

pytestmark = pytest.mark.gpu
KINDS = ["sliding_attention"] * 3 + ["full_attention"]


def store(device, layout):
    geometry = ModelGeometry.uniform(
        KINDS, sliding_window=64, num_kv_heads=2, head_dim=16, dtype="float16"
    )
    kinds = dict.fromkeys(("sliding_attention", "full_attention"), layout)
    return KVStore(geometry, max_context=1024, device=device, layout=kinds, memory="heap")


def filled(made):
    session = made.open([])
    generator = torch.Generator().manual_seed(3)
    for first in range(0, 600, 200):
        with session.step(list(range(first, first + 200))) as step:
            for layer in range(4):
                rows = torch.randn(2, 200, 2, 16, generator=generator).half()
                step.write(layer, *rows.to(made.plan.device))
    return session


def rows_of(session):
    return [
        part.cpu()
        for layer in session.planes
        for live in [session.live(layer)]
        for span in session.spans(layer, live.start, live.stop)
        for part in span
    ]


@pytest.mark.parametrize("ends", ["device to device", "device to machine", "machine to device"])
@pytest.mark.parametrize("layouts", [(a, b) for a in Layout for b in Layout], ids=range(4))
def test_rows_arrive_bit_for_bit(shape: Shape, ends, layouts):
    devices = [shape.device if end == "device" else "cpu" for end in ends.split(" to ")]
    source, target = (store(*each) for each in zip(devices, layouts, strict=True))
    session = filled(source)
    near, far = memory_links()
    thread = threading.Thread(target=send, args=(session, near))
    thread.start()
    received = receive(target, far, timeout_s=60)
    thread.join(60)
    mine, theirs = rows_of(session), rows_of(received.session)

    assert 600 == received.tokens
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
