"""Whole sessions as files: one safetensors file, or kvpack; out, in, and refused when changed."""

import base64
import json
import os
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, safe_open

from kvplane.cli import main
from kvplane.errors import (
    ArgumentError,
    KvpackRejected,
    PackCorrupt,
    PackError,
    PackMismatch,
    PackTooLarge,
    SessionNotFound,
    StorageError,
)
from kvplane.interchange import export_kvpack, import_kvpack, tenant_id
from kvplane.kvpack import Codec, Keys
from kvplane.pack import Fingerprint, load_session, open_root, read_session, save_session
from kvplane.pack.chain import packed_ids
from kvplane.pack.single import read_single, write_single
from kvplane.pack.whole import gathered, put_whole, rows_digest
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, grow, make_root, new_store

KEYS = Keys(bytes(range(32)), tenant=tenant_id("tests"), epoch=3)


@pytest.fixture
def storage():
    return make_root(MemoryStorage(), lengths=(600, 300))


def whole(storage, name="a"):
    return gathered(storage, read_session(storage, name))


def continued(storage, name):
    """A session's rows after 40 more tokens, and its cursors."""
    session = load_session(storage, name, new_store(), FINGERPRINT)[1].session
    grow(session, list(range(600, 640)), seed=7)
    rows = [
        torch.cat([pair[which] for pair in session.spans(layer, session.live(layer).start, 640)])
        for layer in range(6)
        for which in range(2)
    ]
    cursors = {name: cursor.as_tuple() for name, cursor in session.cursors.items()}
    session.close()
    return rows, cursors


def equal(one, other):
    return one[1] == other[1] and all(map(torch.equal, one[0], other[0]))


@pytest.mark.parametrize("form", ["safetensors", "raw", "lossless", "encrypted"])
def test_a_session_goes_out_and_in_and_on_bit_for_bit(storage, tmp_path, form):
    if form == "safetensors":
        write_single(tmp_path / "a.safetensors", whole(storage))
        back = read_single(tmp_path / "a.safetensors")
    else:
        folder = MemoryStorage()
        codec = Codec.LOSSLESS if form == "lossless" else Codec.RAW
        export_kvpack(folder, whole(storage), KEYS, codec=codec, encrypted=form == "encrypted")
        back = import_kvpack(folder, KEYS)
    target = open_root(MemoryStorage(), create=True)
    put_whole(target, back, name="b")
    before, after = read_session(storage, "a"), read_session(target, "b")

    assert equal(continued(storage, "a"), continued(target, "b"))
    assert (before.cursors, before.tokens) == (after.cursors, after.tokens)
    assert (before.state.numerics, before.state.canonical) == (
        after.state.numerics,
        after.state.canonical,
    )


def test_the_safetensors_library_opens_the_file_by_itself(storage, tmp_path):
    path = tmp_path / "a.safetensors"
    write_single(path, whole(storage))
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["kvplane.session"])

    assert {f"layers.{layer}.{which}" for layer in range(6) for which in ("key", "value")} == set(
        tensors
    )
    assert (600, 2, 4) == tuple(tensors["layers.1.key"].shape)
    assert (32, 2, 4) == tuple(tensors["layers.0.key"].shape)
    assert 600 * 4 == len(base64.b64decode(document["tokens"]))
    assert 0o600 == path.stat().st_mode & 0o777


def test_states_of_other_layers_go_along_in_one_file_and_not_in_kvpack(tmp_path):
    storage = open_root(MemoryStorage(), create=True)
    session = grow(new_store().open(tokens=[]), list(range(20)))
    states = {"layers.0.conv": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)}
    save_session(storage, "a", session, FINGERPRINT, states=states)
    write_single(tmp_path / "a.safetensors", whole(storage))
    back = read_single(tmp_path / "a.safetensors")

    assert torch.equal(states["layers.0.conv"], back.states["layers.0.conv"])
    assert rows_digest(back) == rows_digest(whole(storage))
    with pytest.raises(ArgumentError, match="without states"):
        export_kvpack(MemoryStorage(), back, KEYS)


@pytest.mark.parametrize("where", range(0, 100, 7))
def test_no_byte_of_a_safetensors_file_changes_unseen(storage, tmp_path, where):
    path = tmp_path / "a.safetensors"
    write_single(path, whole(storage))
    data = bytearray(path.read_bytes())
    at = where * len(data) // 100
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackError):
        read_single(path)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", PackCorrupt),
        (b"hello", PackCorrupt),
        (struct.pack("<Q", 1 << 63), PackTooLarge),
        (struct.pack("<Q", 2) + b"{}", PackError),
    ],
    ids=["empty", "text", "a header of 2^63", "no session"],
)
def test_what_is_no_such_file_is_refused(tmp_path, data, error):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(error):
        read_single(path)


def test_a_folder_is_no_file_and_a_missing_one_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(StorageError, match=path.name):
            read_single(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(storage, tmp_path):
    path = tmp_path / "a.safetensors"
    path.mkdir()
    with pytest.raises(StorageError):
        write_single(path, whole(storage))

    assert ["a.safetensors"] == [one.name for one in tmp_path.iterdir()]


def of_other_ids(saved):
    return replace(saved, ids=packed_ids([9, *saved.tokens[1:]]))


def of_another_tokenizer(saved):
    return replace(saved, tokenizer="another")


def of_other_weights(saved):
    parts = {**saved.parts, "weights": "others"}
    return replace(
        saved, parts=parts, state=replace(saved.state, fingerprint=Fingerprint(parts).hex)
    )


def of_other_numerics(saved):
    ((stop, numerics),) = saved.state.numerics
    others = ((stop, {**numerics, "torch": "0.0"}),)
    return replace(saved, state=replace(saved.state, numerics=others))


@pytest.mark.parametrize(
    ("lie", "error", "what"),
    [
        (of_other_ids, KvpackRejected, "another text"),
        (of_another_tokenizer, PackMismatch, "semantics"),
        (of_other_weights, PackMismatch, "family"),
        (of_other_numerics, PackMismatch, "family"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_lies_beside_a_kvpack_has_to_be_its_own(storage, lie, error, what):
    folder = MemoryStorage()
    export_kvpack(folder, whole(storage), KEYS)
    folder.replace("session.json", lie(read_session(storage, "a")).encoded())
    with pytest.raises(error, match=what):
        import_kvpack(folder, KEYS)


def test_another_sessions_document_beside_it_is_refused(storage):
    folder = MemoryStorage()
    export_kvpack(folder, whole(storage), KEYS)
    folder.replace("session.json", read_session(storage, "b").encoded())
    with pytest.raises((PackMismatch, KvpackRejected)):
        import_kvpack(folder, KEYS)


@pytest.mark.parametrize("lie", ["a layer less", "a row less", "another dtype"])
def test_rows_that_are_not_those_of_the_layers_are_not_written(storage, lie):
    found = whole(storage)
    key, value = found.rows.pop(2)
    if lie == "a row less":
        found.rows[2] = (key[1:], value)
    elif lie == "another dtype":
        found.rows[2] = (key, value.float())
    before = storage.list()
    with pytest.raises(PackMismatch, match="layer 2"):
        put_whole(storage, found, name="new")

    assert before == storage.list()


def test_another_key_or_tenant_reads_nothing(storage):
    folder = MemoryStorage()
    export_kvpack(folder, whole(storage), KEYS)
    for keys in (
        Keys(bytes(32), tenant=KEYS.tenant, epoch=3),
        Keys(bytes(range(32)), tenant=tenant_id("others"), epoch=3),
    ):
        with pytest.raises(KvpackRejected) as refused:
            import_kvpack(folder, keys)
        assert "authentication" == refused.value.category


def test_an_encrypted_export_shows_neither_ids_nor_rows(storage):
    folder = MemoryStorage()
    export_kvpack(folder, whole(storage), KEYS)
    export_kvpack(folder, whole(storage), KEYS, encrypted=True)
    sealed = [name for name in folder.list() if not name.startswith("chunks/")]
    document = read_session(storage, "a").encoded()

    assert "session.json" not in sealed
    assert not any(document[:200] in folder.read(name, limit=1 << 24) for name in sealed)
    ids = json.loads(document)["tokens"].encode()
    assert not any(ids[:100] in folder.read(name, limit=1 << 24) for name in folder.list())


@pytest.mark.parametrize("length", [0, 27, 28, 40, -1])
def test_a_sealed_document_that_was_changed_is_refused(storage, length):
    folder = MemoryStorage()
    export_kvpack(folder, whole(storage), KEYS, encrypted=True)
    folder.replace("session.sealed", folder.read("session.sealed", limit=1 << 24)[:length])
    with pytest.raises(KvpackRejected):
        import_kvpack(folder, KEYS)


def test_a_chunk_that_is_missing_or_changed_is_refused(storage):
    folder = MemoryStorage()
    export_kvpack(folder, whole(storage), KEYS)
    chunk = folder.list("chunks")[0]
    data = bytearray(folder.read(chunk, limit=1 << 23))
    data[5000] ^= 1
    folder.replace(chunk, data)
    with pytest.raises(KvpackRejected):
        import_kvpack(folder, KEYS)
    folder.delete(chunk)
    with pytest.raises(KvpackRejected, match="no chunk"):
        import_kvpack(folder, KEYS)


def test_a_longer_session_shares_pieces_with_the_shorter(storage):
    folder = MemoryStorage()
    first = export_kvpack(folder, whole(storage, "b"), KEYS)
    second = export_kvpack(folder, whole(storage, "a"), KEYS)

    # two states of two full layers have another only piece; windows lie elsewhere
    assert second.num_chunks < 2 * first.num_chunks
    with pytest.raises(ArgumentError, match=r"one \.kvpack"):
        import_kvpack(folder, KEYS)
    assert 600 == import_kvpack(folder, KEYS, pack=second.pack).saved.state.position


@pytest.mark.parametrize("problem", ["no ids", "elsewhere", "empty"])
def test_what_kvpack_cannot_say_is_refused(problem):
    storage = open_root(MemoryStorage(), create=True)
    store = new_store()
    options = {
        "no ids": {},
        "elsewhere": {"tokens": [], "first_position": 5},
        "empty": {"tokens": []},
    }
    session = store.open(**options[problem])
    if problem != "empty":
        grow(session, list(range(5, 20) if problem == "elsewhere" else range(20)))
    save_session(storage, "a", session, FINGERPRINT)
    with pytest.raises(ArgumentError, match="session"):
        export_kvpack(MemoryStorage(), whole(storage), KEYS)


def test_a_session_is_not_replaced_unasked(storage):
    with pytest.raises(ArgumentError, match="--replace"):
        put_whole(storage, whole(storage, "b"), name="a")

    put_whole(storage, whole(storage, "b"), name="a", replace_it=True)
    assert 300 == read_session(storage, "a").state.position


@pytest.fixture
def root(tmp_path):
    make_root(str(tmp_path / "root"), lengths=(300,), cuts=(256,))
    return str(tmp_path / "root")


def command(capsys, *words):
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("form", ["safetensors", "kvpack"])
def test_commands_take_a_session_out_and_in(root, tmp_path, capsys, monkeypatch, form):
    monkeypatch.setenv("KVPLANE_KVPACK_KEY", bytes(range(32)).hex())
    out = tmp_path / ("a.safetensors" if form == "safetensors" else "out")
    code, said, _ = command(capsys, "pack", "export", "a", out, "--root", root, "--format", form)
    assert (0, True) == (code, str(out) in said)
    again, _, refused = command(
        capsys, "pack", "export", "a", out, "--root", root, "--format", form
    )
    assert (2, True) == (again, "--replace" in refused)
    code, said, _ = command(capsys, "pack", "import", out, "--root", root, "--name", "b")

    assert (0, "b: 300 tokens\n") == (code, said)
    assert read_session(open_root(root), "a").state.numerics == (
        read_session(open_root(root), "b").state.numerics
    )


def test_a_key_comes_from_a_file_never_from_a_word(root, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVPLANE_KVPACK_KEY", raising=False)
    words = ("pack", "export", "a", tmp_path / "out", "--root", root, "--format", "kvpack")
    assert "KVPLANE_KVPACK_KEY" in command(capsys, *words)[2]
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    assert "chmod 600" in command(capsys, *words, "--key-file", key)[2]
    key.chmod(0o600)
    assert 0 == command(capsys, *words, "--key-file", key, "--encrypt", "--lossless")[0]


def test_commands_copy_between_roots_and_sweep(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvplane.pack.sweep.GRACE_S", 0.01)
    other_root = tmp_path / "other"
    code, said, _ = command(capsys, "pack", "push", other_root, "a", "--root", root, "--json")
    pushed = json.loads(said)
    assert (0, ["a"]) == (code, pushed["sessions"])
    assert pushed["blobs_sent"]
    code, said, _ = command(capsys, "pack", "pull", root, "--cuts", "--root", other_root)
    assert "1 sessions and 1 cuts" in said
    for file in (other_root / "blobs").rglob("*.safetensors"):
        os.utime(file, (1, 1))
    assert 0 == command(capsys, "pack", "rm", "a", "--root", other_root)[0]
    code, said, _ = command(
        capsys, "pack", "gc", "--root", other_root, "--budget", "0", "--dry-run"
    )
    assert "would delete" in said
    code, said, _ = command(capsys, "pack", "gc", "--root", other_root, "--budget", "1kB", "--json")

    assert json.loads(said)["blobs"]
    assert not list((other_root / "blobs").rglob("*.safetensors"))


@pytest.mark.parametrize("budget", ["x", "-1", "1 XB", "1e3"])
def test_a_budget_that_is_no_size_is_refused(root, capsys, budget):
    assert "500MB" in command(capsys, "pack", "gc", "--root", root, "--budget=" + budget)[2]


def test_a_session_that_is_not_there_is_refused(root, capsys, tmp_path):
    with pytest.raises(SessionNotFound):
        read_session(open_root(root), "b")
    assert 2 == command(capsys, "pack", "export", "b", tmp_path / "x", "--root", root)[0]
