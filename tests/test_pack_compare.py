import dataclasses

import pytest
import torch

from kvplane import KVStore, ModelGeometry
from kvplane.errors import PackCorrupt, PackMissing
from kvplane.ledger import Span
from kvplane.pack import Aux, Fingerprint, read_session, save_session
from kvplane.pack.blob import blob_name, row_blob
from kvplane.pack.compare import Place, Side, _aligned, compare
from kvplane.pack.encoding import digest
from kvplane.pack.sessions import session_file
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, GEOMETRY, grow, make_root, new_store

TOKENS = list(range(300))


@pytest.fixture
def storage():
    return make_root(MemoryStorage(), lengths=(300, 300), cuts=(256,))


def compared(storage, left, right):
    return compare(*(Side(storage, read_session(storage, name)) for name in (left, right)))


def save_changed(storage, name, changes):
    """The session "a" again under another name, with some rows' bits changed.

    `changes` maps (layer, 0 for key or 1 for value) to (position, head, element, new value)s.
    """
    session = grow(new_store().open(tokens=[]), TOKENS)
    for (layer, what), places in changes.items():
        for position, head, element, new in places:
            session.spans(layer, position, position + 1)[0][what][0, head, element] = new
    save_session(storage, name, session, FINGERPRINT)


def test_a_session_is_bitwise_equal_to_itself_and_to_one_made_by_other_steps(storage):
    for right in ("a", "b"):
        found = compared(storage, "a", right)

        assert found.equal
        assert ((), ()) == (found.fields, found.layers)
        assert found.first is None
        # two full layers of 300 rows, two rings of 32 and two of 64
        assert 2 * (300 + 32 + 64) == found.num_rows


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("what", [0, 1], ids=["key", "value"])
def test_one_element_that_differs_is_found_by_layer_position_and_head(storage, layer, what):
    for position, head, element in ((299, 0, 0), (280, 1, 3), (269, 1, 2)):
        save_changed(storage, "x", {(layer, what): [(position, head, element, 7.0)]})
        found = compared(storage, "a", "x")

        assert not found.equal
        assert Place(position, layer, ("key", "value")[what], head) == found.first
        assert [(layer, 1)] == [(one.layer, one.num_rows) for one in found.layers]
        assert () == found.fields


def test_the_first_difference_is_the_first_position_over_all_layers(storage):
    save_changed(
        storage,
        "x",
        {
            (0, 0): [(290, 0, 0, 7.0)],
            (1, 1): [(17, 1, 0, 7.0)],
            (4, 0): [(17, 0, 0, 7.0)],
            (4, 1): [(5, 1, 1, 7.0)],
        },
    )
    found = compared(storage, "a", "x")

    assert Place(5, 4, "value", 1) == found.first
    assert [(0, "key"), (1, "value"), (4, "key"), (4, "value")] == [
        (one.layer, one.what) for one in found.layers
    ]
    assert Place(17, 1, "value", 1) == found.layers[1].first


def test_a_layer_is_told_by_its_first_place_and_all_rows_over_every_block(storage):
    places = [(290, 0, 0, 7.0), (17, 1, 2, 7.0), (17, 1, 3, 7.0), (256, 0, 1, 7.0)]
    save_changed(storage, "x", {(1, 0): places})
    (layer,) = compared(storage, "a", "x").layers

    assert Place(17, 1, "key", 1) == layer.first
    assert 3 == layer.num_rows


def test_bits_are_compared_and_not_numbers(storage):
    save_changed(storage, "zero", {(1, 0): [(100, 0, 0, 0.0)]})
    save_changed(storage, "minus", {(1, 0): [(100, 0, 0, -0.0)]})
    save_changed(storage, "nan", {(1, 0): [(100, 0, 0, float("nan"))]})
    save_changed(storage, "nan-again", {(1, 0): [(100, 0, 0, float("nan"))]})

    assert Place(100, 1, "key", 0) == compared(storage, "zero", "minus").first
    assert compared(storage, "nan", "nan-again").equal


def test_equal_rows_in_blobs_cut_otherwise_are_equal(storage):
    session = grow(new_store().open(tokens=[]), TOKENS[:128])
    save_session(storage, "short", session, FINGERPRINT)
    grow(session, TOKENS[128:])
    save_session(storage, "pieces", session, FINGERPRINT)

    saved = {name: read_session(storage, name).state for name in ("a", "pieces")}
    full = {name: len(state.groups["f0.2x4x4.f16"].spans) for name, state in saved.items()}
    assert {"a": 2, "pieces": 3} == full
    assert compared(storage, "a", "pieces").equal


def test_what_only_one_has_is_a_field_and_the_rest_is_still_compared(storage):
    session = grow(new_store().open(tokens=[]), TOKENS[:290], seed=0)
    save_session(storage, "shorter", session, FINGERPRINT)
    found = compared(storage, "a", "shorter")
    fields = {difference.field: difference[1:] for difference in found.fields}

    assert not found.equal
    assert (300, 290) == fields["position"]
    assert (300, 290) == fields["number of tokens"]
    assert (268, 258) == fields["s32.2x4x4.f16 origin_logical"]
    assert () == found.layers
    assert 2 * (290 + 22 + 54) == found.num_rows


def test_other_tokens_are_named_at_the_first_that_differs(storage):
    other = [*TOKENS[:42], 9999, *TOKENS[43:]]
    save_session(storage, "x", grow(new_store().open(tokens=[]), other), FINGERPRINT)

    assert [("token 42", 42, 9999)] == [tuple(one) for one in compared(storage, "a", "x").fields]


def test_a_session_without_ids_differs_from_one_with_them(storage):
    session = new_store().open()
    grow(session, TOKENS)
    save_session(storage, "x", session, FINGERPRINT)

    assert [("tokens", "300 ids", "none kept")] == [
        tuple(one) for one in compared(storage, "a", "x").fields
    ]
    assert compared(storage, "x", "x").equal


def test_another_model_is_named_by_the_part_that_differs(storage):
    other = Fingerprint.of(GEOMETRY, weights="others", keys_rotated=False)
    save_session(storage, "x", grow(new_store().open(tokens=[]), TOKENS), other)
    found = compared(storage, "a", "x")

    assert [("model.keys_rotated", True, False), ("model.weights", "tests", "others")] == [
        tuple(one) for one in found.fields
    ]
    assert () == found.layers


def test_another_rotation_is_a_difference_although_every_row_is_equal(storage):
    saved = read_session(storage, "a")
    group = "s32.2x4x4.f16"
    capacity, length, logical, physical = saved.cursors[group]
    cursors = {**saved.cursors, group: (capacity, length, logical, physical ^ 1)}
    turned = dataclasses.replace(saved, name="x", cursors=cursors)
    storage.replace(session_file("x"), turned.encoded())
    found = compared(storage, "a", "x")

    assert [(f"{group} origin_physical", physical, physical ^ 1)] == [
        tuple(one) for one in found.fields
    ]
    assert () == found.layers


def test_who_made_the_rows_and_for_which_tokenizer_is_told_and_changes_no_bit(storage):
    saved = read_session(storage, "a")
    ((_, made),) = saved.state.numerics
    other = dataclasses.replace(
        saved,
        name="x",
        tokenizer="words",
        state=dataclasses.replace(
            saved.state, numerics=((100, made), (300, {**made, "torch": "9.9"})), canonical=0
        ),
    )
    storage.replace(session_file("x"), other.encoded())
    found = compared(storage, "a", "x")

    assert found.equal
    assert [
        ("canonical", 256, 0),
        ("rows [100, 300).torch", made["torch"], "9.9"),
        ("tokenizer", None, "words"),
    ] == [tuple(one) for one in found.provenance]


def test_states_are_compared_by_bits_name_by_name(storage):
    def save_with(name, states):
        session = grow(new_store().open(tokens=[]), TOKENS)
        save_session(storage, name, session, FINGERPRINT, states=states)

    conv = torch.tensor([0.0, 1.0])
    save_with("x", {"layers.0.conv": conv, "layers.1.conv": conv, "layers.2.conv": conv})
    save_with("y", {"layers.0.conv": conv, "layers.1.conv": -conv, "layers.3.conv": conv.double()})

    assert ("layers.1.conv", "layers.2.conv", "layers.3.conv") == compared(storage, "x", "y").states
    assert ("layers.0.conv", "layers.1.conv", "layers.2.conv") == compared(storage, "x", "a").states
    assert compared(storage, "x", "x").equal
    assert not compared(storage, "x", "a").equal


@pytest.mark.parametrize(
    "other", [torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2)], ids=["dtype", "shape"]
)
def test_states_of_equal_bytes_and_another_kind_differ(storage, other):
    for name, state in (("x", torch.zeros(2)), ("y", other)):
        session = grow(new_store().open(tokens=[]), TOKENS)
        save_session(storage, name, session, FINGERPRINT, states={"layers.0.conv": state})

    assert ("layers.0.conv",) == compared(storage, "x", "y").states


def test_other_images_are_named(storage):
    session = grow(new_store().open(tokens=[]), TOKENS)
    save_session(storage, "x", session, FINGERPRINT, aux=[Aux(3, 7, "image", "0" * 64)])

    assert ["aux"] == [one.field for one in compared(storage, "a", "x").fields]


def test_a_model_of_other_layers_shares_no_group_and_is_told_so(storage):
    # one layer more shifts every group of equal name to other layers
    other = ModelGeometry(layers=(GEOMETRY.layers[1], *GEOMETRY.layers))
    other = dataclasses.replace(other, dtype="float16")
    session = KVStore(other, max_context=2048).open(tokens=[])
    with session.step(TOKENS[:10]) as step:
        for layer in range(7):
            step.write(layer, torch.zeros(10, 2, 4).half(), torch.zeros(10, 2, 4).half())
    save_session(storage, "x", session, Fingerprint.of(other, weights="tests"))
    found = compared(storage, "a", "x")

    assert "model.groups.f0.2x4x4.f16" in {one.field for one in found.fields}
    assert 0 == found.num_rows


def test_a_group_that_one_does_not_have_is_named(storage):
    other = dataclasses.replace(GEOMETRY, layers=GEOMETRY.layers[:2])
    session = KVStore(other, max_context=2048).open(tokens=[])
    save_session(storage, "x", session, Fingerprint.of(other, weights="tests"))
    fields = {one.field: one[1:] for one in compared(storage, "a", "x").fields}

    assert ((64, 64, 236, 44), None) == fields["s64.2x4x4.f16"]


def test_a_blob_that_ends_before_its_span_is_refused(storage):
    session = grow(new_store().open(tokens=[]), TOKENS, seed=1)
    group = next(group for group in session.groups if group.id == "f0.2x4x4.f16")
    data = row_blob(group, 256, {n: session.spans(n, 256, 299) for n in group.layers})
    storage.put(blob_name(digest(data).hex()), data)
    saved = read_session(storage, "a")
    spans = list(saved.state.groups[group.id].spans)
    spans[-1] = spans[-1]._replace(blob=digest(data).hex())
    rows = dataclasses.replace(saved.state.groups[group.id], spans=tuple(spans))
    state = dataclasses.replace(saved.state, groups={**saved.state.groups, group.id: rows})
    forged = dataclasses.replace(saved, name="x", state=state)
    storage.replace(session_file("x"), forged.encoded())

    with pytest.raises(PackCorrupt, match=r"holds positions \[256, 299\)"):
        compared(storage, "a", "x")


def test_sessions_of_two_roots_are_compared(storage):
    other = make_root(MemoryStorage(), lengths=(300,), cuts=())

    assert compare(
        Side(storage, read_session(storage, "a")), Side(other, read_session(other, "a"))
    ).equal


def test_only_blobs_that_differ_are_read(storage):
    save_changed(storage, "x", {(1, 0): [(299, 0, 0, 7.0)]})
    mine = read_session(storage, "a").state.groups["s32.2x4x4.f16"].spans[0].blob
    storage.delete(blob_name(mine))

    assert Place(299, 1, "key", 0) == compared(storage, "a", "x").first


@pytest.mark.parametrize(("content", "error"), [(None, PackMissing), (b"x", PackCorrupt)])
def test_a_blob_that_is_needed_and_not_right_is_refused_by_name(storage, content, error):
    save_changed(storage, "x", {(1, 0): [(299, 0, 0, 7.0)]})
    blob = read_session(storage, "x").state.groups["f0.2x4x4.f16"].spans[-1].blob
    storage.delete(blob_name(blob))
    if content is not None:
        storage.put(blob_name(blob), content)

    with pytest.raises(error, match=blob):
        compared(storage, "a", "x")


def test_spans_are_aligned_whatever_their_edges():
    left = [Span(0, 4, "a"), Span(4, 10, "b"), Span(10, 12, "c")]
    right = [Span(2, 3, "d"), Span(3, 10, "e"), Span(10, 20, "f")]

    assert [
        (Span(2, 3, "a"), Span(2, 3, "d")),
        (Span(3, 4, "a"), Span(3, 4, "e")),
        (Span(4, 10, "b"), Span(4, 10, "e")),
        (Span(10, 12, "c"), Span(10, 12, "f")),
    ] == list(_aligned(left, right))
    assert [] == list(_aligned(left, []))
    assert [] == list(_aligned(left, [Span(50, 60, "z")]))
