"""Blobs that are whole and not what a session says: refused by what is wrong, nothing made."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from made_by_hand import Made, bits_of

from kvplane.errors import PackCorrupt, PackMissing, PackTooLarge, PackVersion
from kvplane.pack import load_session, open_root, read_session, save_session
from kvplane.pack.blob import blob_name
from kvplane.pack.encoding import digest, sealed
from kvplane.pack.sessions import session_file
from kvplane.storage import MemoryStorage

LIMIT = 1 << 26
FULL, SLIDING = "f0.1x2x2.f32", "s300.1x2x2.f32"


class Root:
    """A saved session of 600 tokens, whose document is then told otherwise."""

    def __init__(self):
        self.made = Made(300, None)
        self.storage = open_root(MemoryStorage(), create=True)
        self.session = self.made.open(range(600))
        save_session(self.storage, "s", self.session, self.made.fingerprint)
        self.spans = {
            name: [span.blob for span in rows.spans]
            for name, rows in read_session(self.storage, "s").state.groups.items()
        }

    def name(self, group, number, blob):
        """Have a span name another blob."""
        fields = json.loads(self.storage.read(session_file("s"), limit=LIMIT))
        fields["groups"][group]["spans"][number][2] = blob
        self.storage.replace(session_file("s"), sealed("session", fields))

    def keep(self, data):
        """Keep bytes as a blob, under their own digest."""
        name = digest(data).hex()
        self.storage.replace(blob_name(name), data)
        return name

    def blob(self, group, number):
        """A span's blob, to be changed."""
        return bytearray(self.storage.read(blob_name(self.spans[group][number]), limit=LIMIT))

    def refused(self, kind, match):
        """Whether a load is refused for this, with nothing made."""
        held = self.made.store.memory()
        with pytest.raises(kind, match=match):
            load_session(self.storage, "s", self.made.store, self.made.fingerprint)
        return held == self.made.store.memory()


def test_what_was_not_changed_loads():
    root = Root()
    loaded = load_session(root.storage, "s", root.made.store, root.made.fingerprint)[1].session

    assert bits_of(root.session) == bits_of(loaded)


@pytest.mark.parametrize("number", [0, 1])
def test_another_block_of_the_group_is_refused(number):
    root = Root()
    root.name(FULL, number, root.spans[FULL][1 - number])

    assert root.refused(PackCorrupt, r"holds \[\d+, \d+\), not all of \[")


@pytest.mark.parametrize(("group", "other"), [(FULL, SLIDING), (SLIDING, FULL)])
def test_the_same_positions_of_another_group_are_refused(group, other):
    root = Root()
    root.name(group, -1, root.spans[other][-1])

    # the blob that both name is right for one of them
    assert root.refused(PackCorrupt, "raw ones of")


def test_a_blob_that_lacks_the_last_row_of_its_span_is_refused():
    root = Root()
    shorter = root.made.open(range(599))
    written = save_session(root.storage, "t", shorter, root.made.fingerprint)
    last = read_session(root.storage, "t").state.groups[FULL].spans[-1].blob
    root.name(FULL, 2, last)

    assert written.blobs_named
    assert root.refused(PackCorrupt, r"holds \[512, 599\), not all of \[512, 600\)")


@pytest.mark.parametrize(
    ("old", "new", "kind", "match"),
    [
        (b'\\"format\\":1', b'\\"format\\":2', PackVersion, "format 2"),
        (b'\\"codec\\":\\"raw\\"', b'\\"codec\\":\\"raw,', PackCorrupt, "JSON"),
        (b'\\"first\\":256', b'\\"first\\":257', PackCorrupt, "not in one block"),
        (b'\\"count\\":256', b'\\"count\\":255', PackCorrupt, "tensors are not those of 255 rows"),
        (b'"dtype":"F32"', b'"dtype":"I32"', PackCorrupt, "tensors are not those"),
        (b"layers.1.key", b"layers.0.key", PackCorrupt, "tensors are not those"),
        (b"  ", b" \n", PackCorrupt, "canonical"),
    ],
    ids=["format", "codec", "first", "count", "dtype", "layer", "padding"],
)
def test_a_header_that_lies_under_its_own_digest_is_refused_by_the_lie(old, new, kind, match):
    root = Root()
    data = root.blob(FULL, 1)
    assert old in data[:2000]
    root.name(FULL, 1, root.keep(bytes(data.replace(old, new, 1))))

    assert root.refused(kind, match)


@pytest.mark.parametrize(
    "change", [lambda data: data[:-4], lambda data: data + bytes(4)], ids=["shorter", "longer"]
)
def test_data_of_another_length_under_its_own_digest_is_refused(change):
    root = Root()
    root.name(FULL, 2, root.keep(change(bytes(root.blob(FULL, 2)))))

    assert root.refused(PackCorrupt, "its tensors have .* bytes, the file")


def test_a_blob_of_more_than_a_block_can_have_takes_no_memory():
    class Large(MemoryStorage):
        def reading(self, name):
            # nobody may read it
            return (
                nullcontext(SimpleNamespace(nbytes=1 << 50))
                if name == large
                else (super().reading(name))
            )

    root = Root()
    large = blob_name(root.spans[FULL][0])
    storage = Large()
    for name in root.storage.list():
        storage.replace(name, root.storage.read(name, limit=LIMIT))
    root.storage = storage

    assert root.refused(PackTooLarge, "1125899906842624")


def test_a_blob_that_is_gone_is_named_with_who_needs_it():
    root = Root()
    blob = root.spans[SLIDING][0]
    root.storage.delete(blob_name(blob))

    assert root.refused(PackMissing, f"{blob}.*session s")


def test_a_blob_that_changes_between_two_looks_is_never_half_believed():
    class Changing(MemoryStorage):
        def reading(self, name):
            if name == changing:
                self.replace(name, next(versions, right))
            return super().reading(name)

    root = Root()
    changing = blob_name(root.spans[FULL][0])
    right = bytes(root.blob(FULL, 0))
    versions = iter([right[:-1] + b"\1", right])
    storage = Changing()
    for name in root.storage.list():
        storage.replace(name, root.storage.read(name, limit=LIMIT))
    root.storage = storage

    assert root.refused(PackCorrupt, "digest")
    loaded = load_session(storage, "s", root.made.store, root.made.fingerprint)[1].session
    assert bits_of(root.session) == bits_of(loaded)
