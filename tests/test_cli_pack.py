import json
import shutil

import pytest

from kvplane.cli import main
from kvplane.pack import open_root, read_session, save_session
from kvplane.pack.blob import blob_name
from kvplane.storage import open_storage
from saved_roots import FINGERPRINT, grow, make_root, new_store

REFUSED = 2


@pytest.fixture(scope="module")
def sound_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound") / "root"
    storage = make_root(root, lengths=(300, 300, 10), cuts=(256,))
    session = new_store().open(tokens=[])
    grow(session, list(range(300)))
    session.spans(4, 290, 291)[0][0][0, 1, 2] = 7.0
    save_session(storage, "changed", session, FINGERPRINT)
    return root


@pytest.fixture
def root(sound_root, tmp_path, monkeypatch):
    """A copy to change; no terminal's width and no other root."""
    monkeypatch.setenv("KVPLANE_HOME", str(tmp_path / "missing"))
    return shutil.copytree(sound_root, tmp_path / "root")


@pytest.fixture
def run(root, capsys):
    """One call of the command: exit code, what it printed, what it complained of."""

    def call(*arguments, on=root):
        try:
            code = main(["pack", *arguments, "--root", str(on)])
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def cut_files(root):
    return list(open_storage(root).list("cuts"))


def test_ls_names_every_session_and_counts_the_cuts(run):
    code, out, _ = run("ls")
    lines = [line.split()[:2] for line in out.splitlines()]

    assert 0 == code
    for line in (["a", "300"], ["b", "300"], ["c", "10"], ["changed", "300"], ["1", "cuts"]):
        assert line in lines


def test_ls_lists_cuts_by_the_name_that_show_and_rm_take(run, root):
    (cut,) = cut_files(root)

    assert cut in run("ls", "--cuts")[1]
    assert "256 tokens" in run("show", cut)[1]
    assert 0 == run("rm", cut)[0]
    assert [] == cut_files(root)


def test_ls_shows_what_cannot_be_read_and_goes_on(run, root):
    (root / "sessions" / "a.json").write_bytes(b"{")
    code, out, _ = run("ls")
    facts = json.loads(run("ls", "--json")[1])

    assert 0 == code
    assert "damaged" in next(line for line in out.splitlines() if line.startswith("a"))
    assert {"a"} == {one["name"] for one in facts if one["error"]}
    assert 5 == len(facts)


def test_show_says_position_rows_rotation_and_who_made_them(run, root):
    code, out, _ = run("show", "a")
    facts = json.loads(run("show", "a", "--json")[1])
    saved = read_session(open_root(root), "a")

    assert 0 == code
    assert "a: 300 tokens" in out
    assert "weights tests" in out
    assert saved.state.fingerprint in out
    assert [300, dict(saved.state.numerics[0][1])] == facts["numerics"][0]
    for group, (capacity, length, logical, physical) in saved.cursors.items():
        assert {
            "capacity": capacity,
            "length": length,
            "origin_logical": logical,
            "origin_physical": physical,
        } == facts["groups"][group]["cursor"]
        assert group in out


@pytest.mark.parametrize(
    "name",
    [
        "chxnged",
        "sessions/a.json",
        "../a",
        "cuts/" + "0" * 64 + "/" + "0" * 64 + "/1.-." + "0" * 16 + ".json",
    ],
)
@pytest.mark.parametrize("verb", ["show", "rm"])
def test_a_name_that_is_not_there_is_refused_with_the_nearest(run, root, name, verb):
    before = open_storage(root).list()
    code, _, complaint = run(verb, name)

    assert REFUSED == code
    assert complaint.startswith("kvplane: ")
    assert ("nearest: changed" in complaint) == (name == "chxnged")
    assert before == open_storage(root).list()


def test_du_adds_up(run, root):
    facts = json.loads(run("du", "--json")[1])
    files = [path for path in root.rglob("*") if path.is_file()]
    code, out, _ = run("du", "--cuts")

    assert sum(path.stat().st_size for path in files) == facts["nbytes"]
    assert ["a", "b", "c", "changed"] == [share["name"] for share in facts["shares"]]
    assert 0 == code
    assert cut_files(root)[0] in out


def test_du_says_what_a_removed_session_leaves(run):
    own = next(s for s in json.loads(run("du", "--json")[1])["shares"] if s["name"] == "c")
    run("rm", "c")

    assert own["own_nbytes"] == json.loads(run("du", "--json")[1])["unnamed"]["nbytes"] > 0
    assert "blobs that nothing names" in run("du")[1]


def test_rm_removes_all_or_none(run):
    code, _, complaint = run("rm", "a", "nope", "b")

    assert REFUSED == code
    assert "no session 'nope'" in complaint
    assert {"a", "b"} <= {one["name"] for one in json.loads(run("ls", "--json")[1])}
    assert 0 == run("rm", "a", "b", "a")[0]
    assert {"c", "changed"} == {
        one["name"] for one in json.loads(run("ls", "--json")[1]) if one["kind"] == "session"
    }


def test_rm_refuses_a_session_that_somebody_writes_and_removes_a_damaged_one(run, root):
    with open_root(root).lock("b"):
        code, _, complaint = run("rm", "a", "b")

    assert REFUSED == code
    assert "in use by process" in complaint
    (root / "sessions" / "b.json").write_bytes(b"")
    assert 0 == run("rm", "a", "b")[0]
    assert not (root / "sessions" / "a.json").exists()


def test_rm_of_nothing_is_refused(run):
    assert REFUSED == run("rm")[0]


def test_verify_of_a_sound_root_exits_with_0(run):
    code, out, _ = run("verify")

    assert 0 == code
    assert "4 of 4 sessions can be resumed" in out
    assert "1 of 1 cuts can be resumed" in out
    assert "all is well" in out


def test_verify_names_what_is_broken_and_what_can_still_be_used(run, root):
    state = read_session(open_root(root), "b").state
    blob = state.groups["f0.2x4x4.f16"].spans[-1].blob
    (root / blob_name(blob)).write_bytes(b"x")
    code, out, _ = run("verify")
    facts = json.loads(run("verify", "--json")[1])

    assert 1 == code
    assert f"broken: {blob_name(blob)}: its bytes have the digest" in out
    assert "session b at 300 cannot be resumed:" in out
    assert f"positions [256, 300) of f0.2x4x4.f16: {blob_name(blob)}" in out
    assert f"its first 256 of 300 tokens can, from {cut_files(root)[0]}" in out
    assert "broken files: 1" in out
    assert [blob_name(blob)] == [problem["file"] for problem in facts["problems"]]
    assert not facts["sound"]


def test_verify_counts_reasons_beyond_the_first_few(run, root):
    for path in root.rglob("blobs/*/*"):
        path.unlink()
    code, out, _ = run("verify")

    assert 1 == code
    assert "and 1 more" in out
    assert "0 of 4 sessions can be resumed" in out


def test_verify_mentions_foreign_files_and_unnamed_blobs(run, root):
    (root / "notes.txt").write_bytes(b"")
    run("rm", "c")
    code, out, _ = run("verify")

    assert 0 == code
    assert "not ours: notes.txt" in out
    assert "3 blobs that nothing names" in out


def test_diff_of_equal_sessions_exits_with_0(run):
    code, out, _ = run("diff", "a", "b")

    assert 0 == code
    assert "all bits are equal" in out
    assert "bitwise equal" in out.splitlines()


def test_diff_says_where_sessions_first_differ(run):
    code, out, _ = run("diff", "a", "changed")
    facts = json.loads(run("diff", "a", "changed", "--json")[1])

    assert 1 == code
    assert "rows first differ at position 290, layer 4, key, head 1" in out
    assert "different" in out.splitlines()
    assert {"position": 290, "layer": 4, "what": "key", "head": 1} == facts["first"]
    assert not facts["equal"]


def test_diff_of_sessions_of_other_lengths_names_the_fields(run):
    code, out, _ = run("diff", "a", "c")

    assert 1 == code
    assert ["position", "300", "10"] in [line.split() for line in out.splitlines()]


def test_diff_reaches_into_another_root(run, root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")

    assert 0 == run("diff", "a", "a", "--right-root", str(tmp_path / "copy"))[0]


@pytest.mark.parametrize("arguments", [("a", "nope"), ("nope", "a")])
def test_diff_of_a_session_that_is_not_there_is_refused(run, arguments):
    assert REFUSED == run("diff", *arguments)[0]


VERBS = (("ls",), ("show", "a"), ("du",), ("rm", "a"), ("verify",), ("diff", "a", "b"))


@pytest.mark.parametrize("arguments", VERBS, ids=[verb[0] for verb in VERBS])
def test_a_root_that_is_missing_or_a_file_or_an_address_is_refused_and_not_made(
    run, tmp_path, arguments
):
    (tmp_path / "file").write_bytes(b"precious")
    for where, what in (("nothing", "no such folder"), ("file", "ENOTDIR")):
        code, out, complaint = run(*arguments, on=tmp_path / where)

        assert (REFUSED, "") == (code, out)
        assert what in complaint
    assert "no storage for addresses" in run(*arguments, on="ftp://bucket")[2]
    assert not (tmp_path / "nothing").exists()
    assert b"precious" == (tmp_path / "file").read_bytes()


def test_without_a_root_the_one_that_run_keeps_is_meant(root, monkeypatch, capsys):
    monkeypatch.setenv("KVPLANE_HOME", str(root))

    assert 0 == main(["pack", "ls"])
    assert "changed" in capsys.readouterr().out
