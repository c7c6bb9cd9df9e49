"""The fuzzing targets over their corpus and a bounded number of mutations, without a fuzzer."""

import random
import time
import tracemalloc
from pathlib import Path

import pytest
from targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
SEEDS = [(name, path.name) for name in TARGETS for path in sorted((CORPUS / name).iterdir())]
SECONDS = 0.25
WORDS = (
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x80",
    b"9" * 20,
    b"-1",
    b"null",
    b"{}",
    b"[]",
    b'""',
    b"1e400",
    b"NaN",
    b"\xed\xa0\x80",
    b'"\\ud800"',
    b"[" * 30,
    b'{"a":' * 30,
    b"true",
)


def mutated(data, draw):
    """A few bytes other, gone, repeated, or a word that readers stumble over."""
    data = bytearray(data)
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at : at + draw.randrange(1, 20)]
        elif kind == 2:
            data[at:at] = data[at : at + draw.randrange(1, 20)]
        elif kind == 3:
            word = draw.choice(WORDS)
            data[at : at + draw.choice((0, len(word)))] = word
        else:
            data = data[:at]
    return bytes(data)


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_a_seed_is_read_and_its_mutations_are_read_or_refused(name, seed):
    target = TARGETS[name]
    data = (CORPUS / name / seed).read_bytes()
    draw = random.Random(seed)
    target(data)
    end = time.monotonic() + SECONDS
    count = 0
    while time.monotonic() < end and count < 2000:
        target(mutated(data, draw))
        count += 1

    assert count > 0


@pytest.mark.parametrize("name", TARGETS)
def test_no_length_that_is_claimed_takes_memory(name):
    target = TARGETS[name]
    draw = random.Random(name)
    data = min((path.read_bytes() for path in (CORPUS / name).iterdir()), key=len)
    target(data)
    tracemalloc.start()
    for _ in range(60):
        at = draw.randrange(max(1, len(data) - 8))
        target(data[:at] + draw.choice(WORDS) + data[at + 4 :])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < (4 << 20) + 20 * len(data)
