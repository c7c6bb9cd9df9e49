"""What an opening may say, and that it says nothing else."""

import json

import pytest

import tiny
from kvplane.pack import Fingerprint
from kvplane.pack.encoding import canonical
from kvplane.transfer import TransferCorrupt, TransferVersion
from kvplane.transfer.opening import Opening
from kvplane.transfer.sender import opening_of

RING, FULL = (group.id for group in tiny.geometry(4, None).groups)


def stated(**options):
    session = tiny.filled(tiny.store(4, None).open([]), 11)
    fingerprint = Fingerprint.of(tiny.geometry(4, None), weights="one")
    return opening_of(session, fingerprint=fingerprint, **options)[0]


def test_an_opening_is_read_as_it_was_written():
    opening = stated(position=10, chunk=256, schedule="chapter")

    assert opening == Opening.decoded(opening.encoded())
    assert (10, 0, 40) == (opening.position, opening.first_position, opening.ids_nbytes)
    assert {RING: (4, 3, 7, 3), FULL: (64, 10, 0, 0)} == opening.cursors


def test_equal_sessions_have_equal_openings():
    assert stated().encoded() == stated().encoded()


CHANGES = [
    ("position", 0),
    ("position", -1),
    ("position", 11.5),
    ("position", True),
    ("position", "11"),
    ("position", 12),
    ("position", (1 << 24) + 1),
    ("first_position", 11),
    ("first_position", None),
    ("first_position", 1),
    ("geometry", {}),
    ("geometry", None),
    ("cursors", []),
    ("cursors", {}),
    (f"cursors.{RING}", None),
    (f"cursors.{RING}", [4, 4, 7]),
    (f"cursors.{RING}", [4, 4, 7, 4]),
    (f"cursors.{RING}", [4, 4, 6, 3]),
    (f"cursors.{RING}", [4, 5, 6, 3]),
    (f"cursors.{RING}", [4, 1, 10, 2]),
    (f"cursors.{FULL}", [64, 10, 1, 1]),
    (f"cursors.{FULL}", [0, 11, 0, 0]),
    ("layouts", None),
    ("layouts", {}),
    (f"layouts.{RING}", "NDH"),
    (f"layouts.{RING}", 1),
    ("fingerprint", {}),
    ("fingerprint", 1),
    ("fingerprint.weights", ""),
    ("tokens", "00"),
    ("tokens", 1),
    ("numerics", None),
    ("numerics", [[11]]),
    ("numerics", [[11, {}]]),
    ("numerics", [[12, {"chunk": 256}]]),
    ("numerics", [[5, {"chunk": 256}], [5, {"chunk": 128}]]),
    ("numerics", [[0, {"chunk": 256}]]),
    ("canonical", -1),
    ("canonical", 12),
    ("canonical", None),
    ("schedule", "other"),
    ("schedule", None),
    ("schedule", []),
    ("chunk", 0),
    ("chunk", 100),
    ("chunk", "256"),
    ("chunk", None),
    ("more", 1),
]


@pytest.mark.parametrize(("field", "value"), CHANGES, ids=range(len(CHANGES)))
def test_what_an_opening_cannot_say_is_refused(field, value):
    fields = json.loads(stated().encoded())
    *path, last = field.split(".", 1) if field.count(".") else [field]
    place = fields
    for name in path:
        place = place[name]
    place[last] = value
    with pytest.raises(TransferCorrupt):
        Opening.decoded(canonical(fields))


@pytest.mark.parametrize("name", sorted(json.loads(stated().encoded())))
def test_every_field_must_be_there(name):
    fields = json.loads(stated().encoded())
    del fields[name]
    with pytest.raises((TransferCorrupt, TransferVersion)):
        Opening.decoded(canonical(fields))


def test_canonical_rows_have_somebody_who_made_them():
    fields = json.loads(stated().encoded()) | {"numerics": [], "canonical": 1}
    with pytest.raises(TransferCorrupt):
        Opening.decoded(canonical(fields))


def test_another_format_is_called_that():
    fields = json.loads(stated().encoded()) | {"format": 2}
    with pytest.raises(TransferVersion) as refused:
        Opening.decoded(canonical(fields))

    assert (1, 2) == (refused.value.expected, refused.value.got)


@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-1], lambda data: data + b" ", lambda data: data.replace(b":", b": ", 1)],
    ids=["cut", "longer", "spaces"],
)
def test_only_the_one_text_of_an_opening_is_one(change):
    with pytest.raises(TransferCorrupt):
        Opening.decoded(change(stated().encoded()))


def test_no_number_beyond_53_bits_and_no_deep_nesting_is_taken():
    for value in (b"9007199254740993", b"[" * 40 + b"]" * 40, b"1.5"):
        data = stated().encoded().replace(b'"canonical":0', b'"canonical":' + value)
        with pytest.raises(TransferCorrupt):
            Opening.decoded(data)
