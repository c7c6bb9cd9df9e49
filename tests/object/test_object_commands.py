"""Commands whose root is an address."""

import json

import pytest

from kvplane.cli import main
from kvplane.pack import open_root, read_session
from saved_roots import make_root


@pytest.fixture
def address(s3):
    return f"s3://{s3.bucket()}/packs"


def command(capsys, *words):
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_session_goes_to_a_bucket_and_back_by_commands(address, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvplane.pack.sweep.GRACE_S", 0.01)
    root = tmp_path / "root"
    make_root(str(root), lengths=(300,), cuts=(256,))
    assert 0 == command(capsys, "pack", "push", address, "--cuts", "--root", root)[0]
    for words in (
        ("ls",),
        ("du",),
        ("show", "a"),
        ("verify",),
        ("show", f"{address}/sessions/a.json"),
    ):
        place = () if "://" in words[-1] else ("--root", address)
        code, said, refused = command(capsys, "pack", *words, *place)
        assert (0, "") == (code, refused)
        assert said
    code, said, _ = command(capsys, "pack", "gc", "--root", address, "--budget", "1GB", "--json")
    assert [] == json.loads(said)["blobs"]
    back = tmp_path / "back"
    assert 0 == command(capsys, "pack", "pull", address, "a", "--root", back)[0]

    assert read_session(open_root(root), "a") == read_session(open_root(back), "a")


def test_exports_go_to_a_bucket_too(address, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KVPLANE_KVPACK_KEY", "11" * 32)
    root = tmp_path / "root"
    make_root(str(root), lengths=(300,), cuts=())
    words = ("pack", "export", "a", address, "--format", "kvpack", "--encrypt", "--root", root)
    assert 0 == command(capsys, *words)[0]
    code, said, _ = command(capsys, "pack", "import", address, "--name", "b", "--root", root)

    assert (0, "b: 300 tokens\n") == (code, said)


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_is_not_there_is_said_in_one_line(capsys):
    code, _, refused = command(capsys, "pack", "ls", "--root", "s3://no-such-bucket-here/packs")

    assert (2, 1) == (code, refused.count("\n"))
    assert "no-such-bucket-here" in refused
