import shutil
from pathlib import Path

import pytest

from kvplane.errors import PackError, PackVersion, StorageError
from kvplane.pack import (
    Aux,
    Fingerprint,
    PrefixCache,
    load_session,
    open_root,
    read_session,
    save_session,
)
from kvplane.pack.blob import (
    blob_name,
)
from kvplane.pack.encoding import digest
from kvplane.pack.inventory import Kind, documents, kind_of
from kvplane.pack.verify import verify
from kvplane.storage import open_storage
from saved_roots import (
    FINGERPRINT,
    GEOMETRY,
    broken,
    cut_at,
    grow,
    make_root,
    new_store,
    unusable,
)

FULL, SLIDING = "f0.2x4x4.f16", "s32.2x4x4.f16"
TOKENS = list(range(300))


@pytest.fixture(scope="module")
def sound_root(tmp_path_factory):
    """A root that nobody changes: sessions of 300, 300 and 10 tokens, cuts at 128, 200 and 256."""
    root = tmp_path_factory.mktemp("sound") / "root"
    make_root(root, lengths=(300, 300, 10), cuts=(128, 200, 256))
    return root


@pytest.fixture
def root(sound_root, tmp_path):
    """A copy to damage."""
    return shutil.copytree(sound_root, tmp_path / "root")


def only_for(root, position, *, but):
    """A blob that a cut needs and no other document, sessions in `but` aside."""
    mine = cut_at(root, position).content.state.blobs
    for one in documents(open_storage(root)):
        if one.name not in {cut_at(root, position).name, *but}:
            mine = mine - one.content.state.blobs
    return min(mine)


def test_a_sound_root_is_sound_and_everything_in_it_can_be_resumed(root):
    report = verify(open_storage(root))

    assert report.sound
    assert ["a", "b", "c"] == [e.name for e in report.entries if e.kind is Kind.SESSION]
    assert [300, 300, 10] == [e.position for e in report.entries if e.kind is Kind.SESSION]
    assert {128, 200, 256} == {e.position for e in report.entries if e.kind is Kind.CUT}
    assert ([], []) == (report.unnamed, report.foreign)
    files = list(Path(root).rglob("blobs/*/*"))
    assert (len(files), sum(file.stat().st_size for file in files)) == (
        report.num_blobs,
        report.nbytes,
    )


def test_verify_changes_nothing(root):
    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}

    before = state()
    verify(open_storage(root))

    assert before == state()


@pytest.mark.parametrize("damage", ["flip", "cut short", "gone"])
def test_every_blob_that_is_damaged_is_named_with_exactly_what_needs_it(sound_root, damage):
    needed = {one.name: one.content.state.blobs for one in documents(open_storage(sound_root))}
    for path in sorted(sound_root.rglob("blobs/*/*")):
        content = path.read_bytes()
        blob = path.name.removesuffix(".safetensors")
        try:
            if damage == "gone":
                path.unlink()
            else:
                path.write_bytes(content[:-1] + (b"" if damage == "cut short" else b"\xff"))
            report = verify(open_storage(sound_root))
        finally:
            path.write_bytes(content)

        assert (set() if damage == "gone" else {blob_name(blob)}) == broken(report)
        assert {name for name, blobs in needed.items() if blob in blobs} == unusable(report)
        reasons = [why for entry in report.entries for why in entry.why_not]
        assert all(blob_name(blob) in why for why in reasons)


def test_what_verify_calls_usable_loads_and_what_it_does_not_is_refused(root):
    session = read_session(open_storage(root), "b")
    last = session.state.groups[FULL].spans[-1]
    (root / blob_name(last.blob)).unlink()
    storage = open_root(root)
    for entry in verify(storage).entries:
        if entry.kind is Kind.SESSION:
            try:
                load_session(storage, entry.name, new_store(), FINGERPRINT)
                loaded = True
            except PackError:
                loaded = False

            assert entry.usable == loaded


def test_a_session_that_is_damaged_says_what_of_it_can_still_be_used(root):
    storage = open_storage(root)
    tail = read_session(storage, "a").state.groups[FULL].spans[-1]
    (root / blob_name(tail.blob)).write_bytes(b"")
    report = verify(storage)
    entry = next(entry for entry in report.entries if entry.name == "a")

    assert not entry.usable
    assert 256 == entry.instead.position
    assert cut_at(root, 256).name == entry.instead.name
    # and with that one damaged too, the next
    (root / blob_name(only_for(root, 256, but=("a", "b")))).unlink()
    entry = next(entry for entry in verify(storage).entries if entry.name == "a")
    assert 200 == entry.instead.position


def test_a_cut_of_other_tokens_model_or_images_is_no_substitute(root):
    storage = open_storage(root)
    session = grow(new_store().open(tokens=[]), list(range(1000, 1300)), seed=1)
    save_session(storage, "other", session, FINGERPRINT)
    session = grow(new_store().open(tokens=[]), TOKENS[:290])
    for fingerprint, aux in (
        (Fingerprint.of(GEOMETRY, weights="others"), ()),
        (FINGERPRINT, (Aux(3, 7, "image", "0" * 64),)),
    ):
        PrefixCache(root, fingerprint).publish(session, TOKENS[:290], aux=aux)
    for name in ("a", "other"):
        tail = read_session(storage, name).state.groups[FULL].spans[-1]
        (root / blob_name(tail.blob)).unlink()
    entries = {entry.name: entry for entry in verify(storage).entries}

    assert 2 == sum(entry.position == 290 and entry.usable for entry in entries.values())
    assert {"a", "b", "other"} >= unusable(verify(storage)) >= {"a", "other"}
    assert 256 == entries["a"].instead.position
    assert entries["other"].instead is None


def test_a_session_that_began_elsewhere_is_not_resumed_from_a_cut_of_equal_ids(root):
    storage = open_storage(root)
    session = grow(new_store().open(tokens=[], first_position=10), TOKENS)
    save_session(storage, "later", session, FINGERPRINT)
    tail = read_session(storage, "later").state.groups[FULL].spans[-1]
    (root / blob_name(tail.blob)).unlink()
    entry = next(entry for entry in verify(storage).entries if entry.name == "later")

    assert not entry.usable
    assert entry.instead is None


@pytest.mark.parametrize("name", ["sessions/a.json", "cut", "node", "root.json"])
def test_a_damaged_document_is_named_and_the_rest_still_verified(root, name):
    files = {"cut": cut_at(root, 128).file, "node": open_storage(root).list("nodes")[0]}
    name = files.get(name, name)
    content = (root / name).read_bytes()
    for data in (b"", content[:-1], content.replace(b'"', b" ", 1), content + b"\n"):
        (root / name).write_bytes(data)
        report = verify(open_storage(root))
        # what needs it: itself, when something is resumed through it
        itself = name if kind_of(name) is Kind.CUT else "a"

        assert not report.sound
        assert {name} == broken(report)
        assert unusable(report) == (
            {itself} if kind_of(name) in {Kind.CUT, Kind.SESSION} else set()
        )
        assert 6 == len(report.entries)


def test_documents_under_each_others_names_are_named(root):
    first, second = root / cut_at(root, 128).file, root / cut_at(root, 256).file
    swapped = first.read_bytes(), second.read_bytes()
    second.write_bytes(swapped[0])
    first.write_bytes(swapped[1])
    (root / "sessions" / "b.json").write_bytes((root / "sessions" / "a.json").read_bytes())
    report = verify(open_storage(root))

    names = {str(path.relative_to(root)) for path in (first, second)}
    assert names | {"sessions/b.json"} == broken(report)
    assert names | {"b"} == unusable(report)


def test_two_blobs_under_each_others_names_are_named(root):
    first, second = sorted(root.rglob("blobs/*/*"))[:2]
    first.rename(root / "x")
    second.rename(first)
    (root / "x").rename(second)

    assert {str(path.relative_to(root)) for path in (first, second)} == broken(
        verify(open_storage(root))
    )


def test_a_file_that_is_no_safetensors_under_its_own_digest_is_named(root):
    for data in (b"", b"\0" * 8, b"x" * 100, (1 << 63).to_bytes(8, "little") + b"{}"):
        file = blob_name(digest(data).hex())
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_bytes(data)
        report = verify(open_storage(root))

        assert {file} == broken(report)
        assert set() == unusable(report)
        (root / file).unlink()


def test_what_nothing_names_and_what_is_not_ours_is_listed_and_is_no_damage(root):
    storage = open_storage(root)
    storage.delete("sessions/c.json")
    storage.put("notes.txt", b"mine")
    storage.lock("a").release()
    report = verify(storage)

    assert report.sound
    assert ["notes.txt"] == report.foreign
    assert 3 == len(report.unnamed)


def test_a_blob_that_is_a_link_out_of_the_root_is_named(root, tmp_path):
    path = min(root.rglob("blobs/*/*"))
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    report = verify(open_storage(root))

    assert {str(path.relative_to(root))} == broken(report)
    assert unusable(report)


def test_a_blob_of_more_than_can_be_checked_takes_no_memory(root):
    file = root / blob_name("ab" * 32)
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as sparse:
        sparse.truncate(1 << 42)
    report = verify(open_storage(root))

    assert {str(file.relative_to(root))} == broken(report)
    assert str(1 << 42) in report.problems[0].what


def test_a_root_of_another_format_is_not_looked_into(root):
    (root / "root.json").write_bytes(b'{"block":256,"format":2,"kind":"kvplane-root"}')

    with pytest.raises(PackVersion, match="format 2"):
        verify(open_storage(root))


def test_a_root_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="no such folder"):
        verify(open_storage(tmp_path / "missing"))


def test_progress_counts_every_byte(root):
    seen = []
    report = verify(open_storage(root), progress=seen.append)

    assert report.nbytes == sum(seen)
