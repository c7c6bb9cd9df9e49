"""Nodes say how much of a prompt was seen: found in few looks, and never believed."""

from made_by_hand import Made

from kvplane.pack import PrefixCache
from kvplane.storage import MemoryStorage

LIMIT = 1 << 20


class Counting(MemoryStorage):
    """Counts the looks at nodes."""

    looks = 0

    def exists(self, name):
        self.looks += name.startswith("nodes/")
        return super().exists(name)

    def read(self, name, *, limit):
        self.looks += name.startswith("nodes/")
        return super().read(name, limit=limit)


def published(num_blocks=6):
    """A cache whose cuts are gone: only nodes are left of a prompt of so many blocks."""
    made = Made(8, None)
    cache = PrefixCache(Counting(), made.fingerprint)
    cache.publish(made.open(range(256 * num_blocks)))
    for file in cache.storage.list("cuts"):
        cache.storage.delete(file)
    return cache


def node_of(cache, block):
    """The file of a block's node."""
    mark = f'"index":{block},'.encode()
    files = cache.storage.list("nodes")
    return next(file for file in files if mark in cache.storage.read(file, limit=LIMIT))


def test_every_length_of_what_was_seen_is_found():
    for num_blocks in range(1, 7):
        cache = published(num_blocks)

        assert 256 * num_blocks == cache.match(range(2000)).seen
        assert [256 * (n // 256) for n in (1, 255, 256, 257, 256 * num_blocks)] == [
            cache.match(range(n)).seen for n in (1, 255, 256, 257, 256 * num_blocks)
        ]


def test_a_prompt_of_500_blocks_takes_few_looks():
    cache = published()
    cache.storage.looks = 0

    assert 1536 == cache.match(range(128_000)).seen
    assert 10 >= cache.storage.looks


def test_a_damaged_node_was_not_seen_and_those_before_it_were():
    cache = published()
    cache.storage.replace(node_of(cache, 5), b"{}")
    cache.storage.replace(node_of(cache, 4), cache.storage.read(node_of(cache, 3), limit=LIMIT))

    assert 1024 == cache.match(range(2000)).seen


def test_a_missing_node_changes_what_was_seen_and_no_position():
    made = Made(8, None)
    cache = PrefixCache(MemoryStorage(), made.fingerprint)
    cache.publish(made.open(range(1536)))
    for file in cache.storage.list("nodes"):
        cache.storage.delete(file)
        match = cache.match(range(2000), made.store)

        assert (1536, 1536) == (match.position, match.seen)
