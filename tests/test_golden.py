"""Golden packs of format 1, and a reader of them that shares no code with ours."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3

import independent_reader as other
from kvplane import KVStore
from kvplane.pack import Fingerprint, PrefixCache, load_session, open_root, save_session
from kvplane.storage import MemoryStorage
from saved_roots import FINGERPRINT, grow, make_root, new_store

TOOLS = Path(__file__).parents[1] / "tools"
GOLDEN = Path(__file__).parent / "golden"
DIGESTS = json.loads((GOLDEN / "digests.json").read_text(encoding="utf-8"))
SESSIONS = [(pack, name) for pack, facts in DIGESTS.items() for name in facts["sessions"]]
CUTS = [(pack, int(at)) for pack, facts in DIGESTS.items() for at in facts["cuts"]]


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import make_golden

    return make_golden


def model_of(maker, pack):
    geometry = {"windows": maker.WINDOWS, "rows": maker.ROWS}[pack]
    return geometry, Fingerprint.of(geometry, weights=f"golden {pack}")


def digest_of(tensor):
    return blake3(tensor.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


def tensors_of(session):
    """Every live row of a session by the names that a blob gives them."""
    found = {}
    for group in session.groups:
        for layer in group.layers:
            live = session.live(layer)
            spans = session.spans(layer, live.start, live.stop)
            for number, what in enumerate(("key", "value")):
                parts = [span[number] for span in spans]
                # an empty session has no spans
                whole = torch.cat(parts) if parts else torch.zeros(0, dtype=session.store.dtype)
                found[f"layers.{layer}.{what}"] = whole
    return found


def digests_of(session):
    return {
        name: digest_of(tensor.half() if not tensor.numel() else tensor)
        for name, tensor in tensors_of(session).items()
    }


def ids_digest(ids):
    return blake3(np.array(ids, dtype="<u4").tobytes()).hexdigest()


@pytest.mark.parametrize("pack", DIGESTS)
def test_no_byte_of_a_golden_pack_was_ever_changed(pack):
    files = {
        str(path.relative_to(GOLDEN / pack)): blake3(path.read_bytes()).hexdigest()
        for path in (GOLDEN / pack).rglob("*")
        if path.is_file()
    }

    assert DIGESTS[pack]["files"] == files


@pytest.mark.parametrize(("pack", "name"), SESSIONS)
def test_a_golden_session_has_every_row_bit_for_bit(maker, pack, name):
    geometry, fingerprint = model_of(maker, pack)
    store = KVStore(geometry, max_context=512, slack=16 if pack == "windows" else 0)
    saved, loaded = load_session(open_root(GOLDEN / pack), name, store, fingerprint)
    facts = DIGESTS[pack]["sessions"][name]
    session = loaded.session

    assert facts["position"] == session.position
    assert facts["rows"] == digests_of(session)
    assert facts["tokens"] == ids_digest(session.tokens)
    assert facts["aux"] == [list(item) for item in saved.aux]
    assert {name: tuple(cursor) for name, cursor in facts["cursors"].items()} == saved.cursors


def test_a_golden_session_lies_in_the_rows_it_lay_in(maker):
    geometry, fingerprint = model_of(maker, "windows")
    store = KVStore(geometry, max_context=512, slack=16, memory="heap")
    _, loaded = load_session(open_root(GOLDEN / "windows"), "long", store, fingerprint)
    facts = DIGESTS["windows"]["sessions"]["long"]["cursors"]

    assert {group.id: tuple(facts[group.id]) for group in geometry.groups if group.is_sliding} == {
        group.id: loaded.session.cursors[group.id].as_tuple()
        for group in geometry.groups
        if group.is_sliding
    }


@pytest.mark.parametrize(("pack", "position"), CUTS)
def test_a_golden_cut_is_found_by_its_prompt(maker, tmp_path, pack, position):
    # a load touches the cut that it takes
    shutil.copytree(GOLDEN / pack, tmp_path / pack)
    geometry, fingerprint = model_of(maker, pack)
    prefixes = PrefixCache(tmp_path / pack, fingerprint, create=False)
    facts = DIGESTS[pack]["cuts"][str(position)]
    prompt = [*(maker.id_at(p) for p in range(position)), 5]
    aux = [item for item in maker.OTHERS if item.first < position]
    match, loaded = prefixes.load(
        prompt, KVStore(geometry, max_context=512), aux=aux, remember=True
    )

    assert position == match.position
    assert facts["rows"] == digests_of(loaded.session)
    assert facts["tokens"] == ids_digest(loaded.session.tokens)


def test_the_same_rows_have_the_same_blobs_today(maker):
    for pack, make in maker.PACKS.items():
        storage = open_root(MemoryStorage(), create=True)
        make(storage)
        named = {file for file in DIGESTS[pack]["files"] if file.startswith("blobs/")}

        assert named == set(storage.list("blobs"))


def test_golden_packs_are_never_written_again(maker, capsys):
    before = {path: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}

    assert 1 == maker.main()
    assert "never replaced" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("pack", "name"), SESSIONS)
def test_another_reader_finds_the_golden_sessions(pack, name):
    facts = DIGESTS[pack]["sessions"][name]
    fields = other.document("session", GOLDEN / pack / "sessions" / f"{name}.json")
    ids = other.tokens(fields)
    rows = other.rows(GOLDEN / pack, fields)

    assert facts["position"] == fields["position"] == len(ids)
    assert facts["tokens"] == ids_digest(ids.tolist())
    assert fields["chain"] == other.chain(fields, ids, len(ids) // 256 * 256)
    assert (facts["rows"] if rows else {}) == {name: digest_of(rows[name]) for name in rows}
    assert facts["firsts"] == {name: held["first"] for name, held in fields["groups"].items()}


@pytest.mark.parametrize("pack", DIGESTS)
def test_another_reader_finds_the_golden_cuts_by_their_names(pack):
    files = sorted((GOLDEN / pack).glob("cuts/*/*/*.json"))

    assert len(DIGESTS[pack]["cuts"]) == len(files)
    for file in files:
        facts = check_cut(GOLDEN / pack, file)
        expected = DIGESTS[pack]["cuts"][str(facts["position"])]

        assert expected["rows"] == {
            name: digest_of(tensor) for name, tensor in other.rows(GOLDEN / pack, facts).items()
        }


def check_cut(root, file):
    """What a cut's file says, once its name is that of its content."""
    fields = other.document("cut", file)
    ids = other.tokens(fields)
    position = fields["position"]
    whole = other.chain(fields, ids, position // 256 * 256)
    tail = other.chain(fields, ids, position)[:16] if position % 256 else "-"
    own = json.loads(file.read_bytes())["self"][:16]

    assert len(ids) == position
    assert fields["chain"] == whole
    name = f"cuts/{fields['fingerprint']}/{whole}/{position}.{tail}.{own}.json"
    assert name == str(file.relative_to(root))
    return fields


def test_another_reader_reads_what_the_writer_writes(tmp_path):
    session = grow(new_store().open(tokens=[]), list(range(300)))
    storage = make_root(tmp_path, lengths=(300, 5, 0), cuts=(256, 300))
    save_session(storage, "here", session, FINGERPRINT)
    fields = other.document("session", tmp_path / "sessions" / "here.json")
    rows = other.rows(tmp_path, fields)
    cuts = storage.list("cuts")

    assert 2 == len(cuts)
    for file in cuts:
        check_cut(tmp_path, tmp_path / file)
    held = tensors_of(session)
    assert set(held) == set(rows)
    for name, tensor in held.items():
        assert torch.equal(tensor.view(torch.int16), rows[name].view(torch.int16))


@pytest.mark.parametrize("what", ["a blob", "a document"])
def test_another_reader_refuses_a_changed_byte(tmp_path, what):
    shutil.copytree(GOLDEN / "rows", tmp_path / "rows")
    file = tmp_path / "rows" / "sessions" / "one.json"
    blob = min((tmp_path / "rows" / "blobs").rglob("*.safetensors"))
    for path in (
        (tmp_path / "rows" / "blobs").rglob("*.safetensors") if what == "a blob" else [file]
    ):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)

    with pytest.raises(AssertionError):
        other.rows(tmp_path / "rows", other.document("session", file))
    assert blob.exists()
