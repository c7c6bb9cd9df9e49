"""What `kvplane inspect` finds in a session or a cut, and what it says of damage."""

import math
import time
import weakref
from pathlib import Path

import pytest
import torch

from kvplane import KVStore, ModelGeometry
from kvplane.errors import ArgumentError, PackCorrupt, SessionNotFound
from kvplane.inspect import found, inspected, look
from kvplane.inspect.heat import COLUMNS, Heat
from kvplane.inspect.strips import blocks_of, shared_nbytes
from kvplane.pack import Fingerprint, save
from kvplane.pack.inventory import Document, Kind
from kvplane.storage import open_storage
from saved_roots import FINGERPRINT, GEOMETRY, cut_at, grow, make_root

RING, WIDER, FULL = "s32.2x4x4.f16", "s64.2x4x4.f16", "f0.2x4x4.f16"


def looked_at(root, name):
    storage = open_storage(root)
    return inspected(storage, found(storage, name))


def part_of(looked, name):
    return next(part for part in looked.groups if part.group.id == name)


@pytest.fixture
def root(tmp_path):
    make_root(tmp_path, lengths=(300, 700))
    return tmp_path


def test_rings_are_told_as_the_session_has_them(root):
    looked = looked_at(root, "b")

    assert (32, 32, 668, 668 % 32) == part_of(looked, RING).cursor
    assert (2048, 700, 0, 0) == part_of(looked, FULL).cursor
    # positions 32, 64, ... 672 are in row 0 again
    assert (21, 10, 0) == tuple(part_of(looked, name).wraps for name in (RING, WIDER, FULL))


def test_a_ring_that_has_just_filled_has_not_wrapped(tmp_path):
    for length, wraps in ((31, 0), (32, 0), (33, 1), (64, 1), (65, 2)):
        make_root(tmp_path / str(length), lengths=(length,), cuts=())

        assert wraps == part_of(looked_at(tmp_path / str(length), "a"), RING).wraps


def test_what_is_held_is_what_the_plan_says(root):
    for name in "ab":
        for part in looked_at(root, name).groups:
            assert part.planned == part.held


def test_a_session_that_went_back_holds_less_than_planned(tmp_path):
    session = grow(KVStore(GEOMETRY, max_context=2048, slack=8).open(tokens=[]), list(range(310)))
    session.rewind(304)
    save(tmp_path, "back", session, FINGERPRINT)
    looked = looked_at(tmp_path, "back")

    assert part_of(looked, FULL).held == part_of(looked, FULL).planned
    assert (34, 40) == (part_of(looked, RING).cursor[1], part_of(looked, RING).cursor[0])
    assert part_of(looked, RING).held == part_of(looked, RING).planned * 34 // 40


def test_a_cut_is_told_where_its_rows_will_lie(root):
    looked = looked_at(root, cut_at(root, 256).file)

    assert "cut" == looked.kind
    assert (32, 31, 225, 1) == part_of(looked, RING).cursor
    assert part_of(looked, FULL).planned == part_of(looked, FULL).held


def test_blocks_that_others_name_are_found(root):
    looked = looked_at(root, "b")

    # the first block of one text, in session a and in its cut
    assert {"a"} < {sharer.name for sharer in looked.sharing.sharers}
    assert 256 * 2 * 32 == shared_nbytes(part_of(looked, FULL), looked)
    assert ["shared", "own"] == [piece.kind for piece in blocks_of(part_of(looked, FULL), looked)]
    assert ["gap", "own"] == [piece.kind for piece in blocks_of(part_of(looked, RING), looked)]


def test_a_session_alone_in_its_root_shares_nothing(tmp_path):
    make_root(tmp_path, lengths=(300,), cuts=())
    looked = looked_at(tmp_path, "a")

    assert (0, {}) == (looked.sharing.num_sharers, looked.sharing.users)


def test_norms_are_those_of_the_rows(tmp_path):
    make_root(tmp_path, lengths=(300,), cuts=())
    looked = looked_at(tmp_path, "a")
    rows = torch.cat([blob_rows(tmp_path, span) for span in part_of(looked, FULL).spans])
    norms = rows.float().norm(dim=-1).mean(dim=-1)

    # two positions a column
    assert (2, 150) == (looked.heat.width, looked.heat.num_columns)
    expected = norms.view(150, 2).mean(dim=1).tolist()
    assert expected == pytest.approx(looked.heat.cells("key", 1), rel=1e-5)


def blob_rows(root, span):
    """The keys of layer 1, by the safetensors library."""
    from safetensors.torch import load_file

    return load_file(root / "blobs" / span.blob[:2] / f"{span.blob}.safetensors")["layers.1.key"]


def test_cells_without_rows_are_empty(root):
    cells = looked_at(root, "b").heat.cells("value", 0)

    # a ring of 32 holds [668, 700) of 700, three positions a column
    assert [None] * 222 == cells[:222]
    assert all(cells[223:])


def test_a_row_that_is_not_finite_spoils_no_cell():
    heat = Heat([0], 4)
    rows = torch.ones(4, 1, 4)
    rows[1] = math.nan
    for part in heat.sums({"layers.0.key": rows}, 0):
        heat.add(part)

    assert [2.0, None, 2.0, 2.0] == heat.cells("key", 0)


@pytest.mark.parametrize("position", [1, 255, 256, 257, 100_000, 1 << 24])
def test_columns_cover_every_position_and_are_few(position):
    heat = Heat([0], position)

    assert COLUMNS >= heat.num_columns
    assert heat.num_columns == (position - 1) // heat.width + 1


def test_every_damaged_blob_is_a_problem_and_the_rest_is_told(root):
    looked = looked_at(root, "b")
    spans = part_of(looked, FULL).spans
    for span, change in zip(spans[:2], (flipped, bytes), strict=False):
        file = root / "blobs" / span.blob[:2] / f"{span.blob}.safetensors"
        file.write_bytes(change(file.read_bytes()))
    (root / "blobs" / spans[2].blob[:2] / f"{spans[2].blob}.safetensors").unlink()
    flipped_only = looked_at(root, "b")

    assert 2 == flipped_only.num_problems
    assert flipped_only.problems[0].startswith("positions [0, 256) of f0.2x4x4.f16: ")
    assert "is missing" in flipped_only.problems[1]
    assert flipped_only.heat.cells("key", 1)[-1] is None
    assert flipped_only.heat.cells("key", 1)[100] is not None


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_damaged_cut_whose_layers_nobody_can_say_is_told_all_the_same(root):
    cut = cut_at(root, 256)
    for blob in cut.content.state.blobs:
        (root / "blobs" / blob[:2] / f"{blob}.safetensors").write_bytes(b"no")
    looked = looked_at(root, cut.file)

    assert 3 == looked.num_problems
    assert () == looked.groups


def test_a_name_that_is_nothing_is_refused(root):
    with pytest.raises(SessionNotFound, match="no session 'nothing'"):
        looked_at(root, "nothing")
    with pytest.raises(ArgumentError):
        looked_at(root, "Not A Name")


def test_a_session_file_that_is_damaged_is_refused(root):
    (root / "sessions" / "b.json").write_text("{")

    with pytest.raises(PackCorrupt):
        looked_at(root, "b")
    with pytest.raises(PackCorrupt, match="cannot be read"):
        inspected(open_storage(root), Document(kind=Kind.SESSION, file="sessions/b.json"))


def test_few_blobs_are_in_memory_however_long_the_session(tmp_path, monkeypatch):
    make_root(tmp_path, lengths=(2000,), cuts=())
    alive = weakref.WeakSet()
    most = 0

    class Blob(bytearray):
        __hash__ = object.__hash__

    def read(*arguments, **options):
        nonlocal most
        blob = Blob(read_blob(*arguments, **options))
        alive.add(blob)
        most = max(most, len(alive))
        return blob

    read_blob = look.read_blob
    monkeypatch.setattr(look, "read_blob", read)
    looked = looked_at(tmp_path, "a")

    assert 8 <= looked.num_blobs
    assert look.WORKERS >= most


@pytest.mark.slow
def test_a_session_of_131072_tokens_is_told_in_ten_seconds(tmp_path):
    geometry = ModelGeometry.preset("muse-glimmer-30b")
    session = KVStore(geometry, max_context=131_072).open(tokens=[])
    rows = torch.randn(2, 256, 2, 128).half()
    while session.position < 131_072:
        with session.step(list(range(session.position, session.position + 256))) as step:
            for layer in range(52):
                step.write(layer, *rows * (1 + session.position / 131_072))
    save(tmp_path, "long", session, Fingerprint.of(geometry, weights="none"))
    begin = time.perf_counter()
    looked = looked_at(tmp_path, "long")

    assert (63, 0) == (looked.groups[0].wraps, looked.num_problems)
    assert 10 > time.perf_counter() - begin


def test_the_package_has_its_page_parts_with_it():
    folder = Path(look.__file__).parent

    assert {"page.css", "page.js"} <= {file.name for file in folder.iterdir()}
