"""Secrets of kvpack: where they come from, and where they never go."""

import pytest
import suites

from kvplane.errors import ArgumentError, KvpackRejected
from kvplane.kvpack import Keys, decode_pack, read_root, wire
from kvplane.kvpack import keys as keys_module

ROOT = bytes(range(32))


def written(tmp_path, data, mode=0o600):
    path = tmp_path / "root.key"
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "data", [ROOT, ROOT.hex().encode(), ROOT.hex().upper().encode() + b"\n"], ids=repr
)
def test_a_root_is_read_from_a_file_of_its_owner(tmp_path, data):
    assert ROOT == read_root(written(tmp_path, data))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620], ids=oct)
def test_a_file_that_others_may_open_is_refused(tmp_path, mode):
    with pytest.raises(ArgumentError, match="chmod 600"):
        read_root(written(tmp_path, ROOT, mode))


@pytest.mark.parametrize(
    "data", [b"", ROOT[:-1], ROOT + b"x", b"hunter2hunter2hunter2hunter2hunter2", b"\xff" * 64]
)
def test_what_is_no_root_is_refused_and_not_repeated(tmp_path, data):
    with pytest.raises(ArgumentError, match="64 hexadecimal digits") as refused:
        read_root(written(tmp_path, data))

    assert "hunter" not in str(refused.value)


def test_a_root_is_read_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPLANE_KVPACK_KEY_FILE", str(written(tmp_path, ROOT)))
    assert ROOT == read_root()
    monkeypatch.setenv("KVPLANE_KVPACK_KEY", bytes(32).hex())
    assert bytes(32) == read_root()


def test_without_a_root_anywhere_the_error_says_where_one_may_be(monkeypatch):
    monkeypatch.delenv("KVPLANE_KVPACK_KEY", raising=False)
    monkeypatch.delenv("KVPLANE_KVPACK_KEY_FILE", raising=False)

    with pytest.raises(ArgumentError, match="KVPLANE_KVPACK_KEY_FILE"):
        read_root()


def test_a_missing_file_is_named():
    with pytest.raises(ArgumentError, match="no-such"):
        read_root("no-such.key")


def test_keys_print_no_secret():
    shown = repr(Keys(ROOT, tenant=bytes([1]) * 32))

    assert ROOT.hex() not in shown
    assert repr(ROOT) not in shown


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"root": b"short", "tenant": ROOT}, "root"),
        ({"root": ROOT, "tenant": b""}, "tenant"),
        ({"root": ROOT, "tenant": ROOT, "epoch": 0}, "epoch"),
        ({"root": ROOT, "tenant": ROOT, "epoch_roots": {3: b"short"}}, r"epoch_roots\[3\]"),
    ],
    ids=["root", "tenant", "epoch", "epoch's root"],
)
def test_keys_of_another_form_are_refused(arguments, argument):
    root = arguments.pop("root")
    with pytest.raises(ArgumentError, match=argument):
        Keys(root, **arguments)


@pytest.mark.parametrize(("epoch", "readable"), [(0, False), (36, False), (37, True), (101, False)])
def test_epochs_are_readable_for_a_window(epoch, readable):
    mine = Keys(ROOT, tenant=ROOT, epoch=100)
    if readable:
        assert 32 == len(mine.epoch("manifest-auth", epoch))
        return
    with pytest.raises(KvpackRejected, match="epoch"):
        mine.epoch("manifest-auth", epoch)


def test_an_epoch_may_have_its_own_root_and_only_its_keys_differ():
    one = Keys(ROOT, tenant=ROOT, epoch=8)
    other = Keys(ROOT, tenant=ROOT, epoch=8, epoch_roots={7: bytes(32)})

    assert one.stable("prefix") == other.stable("prefix")
    assert one.epoch("manifest-auth", 8) == other.epoch("manifest-auth", 8)
    assert one.epoch("manifest-auth", 7) != other.epoch("manifest-auth", 7)


def test_every_label_tenant_and_epoch_has_its_own_key():
    found = [
        Keys(ROOT, tenant=bytes([tenant]) * 32, epoch=9).epoch(label, epoch)
        for tenant in (1, 2)
        for label in suites.EPOCH
        for epoch in (8, 9)
    ]
    found += [Keys(ROOT, tenant=ROOT).stable(label) for label in suites.STABLE]

    assert len(found) == len(set(found))


def test_there_is_no_reading_with_another_key():
    other = Keys(bytes([98]) * 32, tenant=suites.keys().tenant, epoch=7)
    with pytest.raises(KvpackRejected) as refused:
        decode_pack(other, suites.fixture().pack)

    assert "authentication" == refused.value.category


def test_keyed_comparisons_take_the_same_time(monkeypatch):
    compared = []
    monkeypatch.setattr(
        keys_module.hmac,
        "compare_digest",
        lambda one, other: compared.append(bytes(one)) or bytes(one) == bytes(other),
    )
    made = suites.fixture()
    decode_pack(suites.keys(), made.pack)

    # the seal of the footer is 32 bytes computed here, never compared by ==
    seal = made.pack[-4096 + 80 :][:32]
    assert seal in compared
    assert wire.hmac is keys_module.hmac
