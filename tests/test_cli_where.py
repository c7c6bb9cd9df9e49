"""`kvplane pack` verbs take names of the sessions that `kvplane run` keeps, and paths."""

import json
import shutil

import pytest

from kvplane.cli import main
from kvplane.cli.where import where, where_all
from kvplane.errors import ArgumentError
from kvplane.pack import open_root, read_session, session_names
from kvplane.pack.blob import blob_name
from saved_roots import make_root

REFUSED = 2


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    make_root(folder / "kept", lengths=(300, 300, 10), cuts=(256,))
    return folder / "kept"


@pytest.fixture
def home(sound, tmp_path, monkeypatch):
    """What `kvplane run` keeps; another root lies beside it as `other`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound, tmp_path / "other")
    folder = shutil.copytree(sound, tmp_path / "home")
    monkeypatch.setenv("KVPLANE_HOME", str(folder))
    return folder


@pytest.fixture
def pack(capsys):
    """One call of a verb: exit code, what it printed, what it complained of."""

    def call(*arguments):
        try:
            code = main(["pack", *arguments])
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def a_cut(root):
    return next(iter(open_root(root).list("cuts")))


def test_a_name_is_a_session_that_run_keeps(home, pack):
    for verb in (["show", "a"], ["diff", "a", "b"], ["verify", "a"], ["du", "a"], ["rm", "c"]):
        assert 0 == pack(*verb)[0]

    assert ["a", "b"] == session_names(open_root(home))


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_a_path_is_a_session_or_cut_of_its_root(home, pack, tmp_path, absolute):
    shutil.rmtree(home)
    root = str(tmp_path / "other") if absolute else "other"
    session, cut = f"{root}/sessions/a.json", f"{root}/{a_cut(root)}"

    assert "300 tokens" in pack("show", session)[1]
    assert "256 tokens" in pack("show", cut)[1]
    for verb in (["diff", session, session], ["verify", session, cut], ["du", session, cut]):
        assert 0 == pack(*verb)[0]
    pack("rm", f"{root}/sessions/c.json", cut)
    assert ["a", "b"] == session_names(open_root(root))
    assert [] == list(open_root(root).list("cuts"))


def test_inside_a_root_its_files_are_paths(home, pack, monkeypatch, tmp_path):
    shutil.rmtree(home)
    monkeypatch.chdir(tmp_path / "other")

    assert 0 == pack("show", "sessions/a.json")[0]


def test_a_name_and_a_path_can_be_compared(home, pack):
    assert 0 == pack("diff", "a", "other/sessions/b.json")[0]
    assert 0 == pack("diff", "other/sessions/b.json", "a")[0]
    assert 1 == pack("diff", "a", "other/sessions/c.json")[0]
    assert read_session(open_root(home), "a").tokens


def test_du_has_a_line_for_each_name_and_no_other(home, pack):
    cut = a_cut(home)
    _, out, _ = pack("du", "c", cut, "--json")

    assert [cut, "c"] == sorted((share["name"] for share in json.loads(out)["shares"]), key=len)[
        ::-1
    ]


def test_verify_of_a_name_is_about_that_name(home, pack):
    storage = open_root(home)
    blobs = {name: read_session(storage, name).state.blobs for name in ("a", "c")}
    (home / blob_name(min(blobs["a"] - blobs["c"]))).write_bytes(b"broken")

    assert 1 == pack("verify")[0]
    assert (0, 1) == (pack("verify", "c")[0], pack("verify", "a")[0])
    _, out, _ = pack("verify", "a")
    assert "session a at 300 cannot be resumed" in out
    assert "not resumable: 1" in out
    assert "session b" not in out
    assert ["c"] == [
        entry["name"] for entry in json.loads(pack("verify", "c", "--json")[1])["entries"]
    ]


@pytest.mark.parametrize(
    "verb", [["show"], ["rm"], ["du"], ["verify"], ["diff", "a"]], ids=lambda verb: verb[0]
)
def test_what_is_not_there_is_refused_with_the_nearest_names(home, pack, verb):
    shutil.copy(home / "sessions" / "a.json", home / "sessions" / "notes.json")
    code, out, complaint = pack(*verb, "noets")

    assert (REFUSED, "") == (code, out)
    assert "no session 'noets'; nearest: notes" in complaint


def test_a_path_needs_no_root_and_several_are_in_one():
    with pytest.raises(ArgumentError, match="a path without --root"):
        where("packs/sessions/a.json", "packs")
    with pytest.raises(ArgumentError, match="all in one root"):
        where_all(["one/sessions/a.json", "two/sessions/a.json"], None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/sessions/a.json", ("/", "a")),
        ("sessions/sessions/a.json", ("sessions", "a")),
        ("s3://bucket/root/sessions/a.json", ("s3://bucket/root", "a")),
        ("x/cuts/f/c/9.-.s.json", ("x", "cuts/f/c/9.-.s.json")),
    ],
)
def test_a_path_is_cut_before_its_last_folder_of_the_format(name, expected):
    assert expected == where(name, None)
