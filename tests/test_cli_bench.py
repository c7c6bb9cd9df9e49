"""`kvplane bench`: which benches it starts, and what it says when one fails."""

import pytest

from kvplane.cli import REFUSED, main
from kvplane.cli import bench as command

SCRIPT = "import pathlib, sys\npathlib.Path('ran').open('a').write({name!r} + str(sys.argv[1:]))\n"


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "bench"
    place.mkdir()
    for name in (*command.REFERENCE, *command.GPU):
        (place / f"{name}.py").write_text(SCRIPT.format(name=name))
    return place


def ran(folder):
    return (folder.parent / "ran").read_text()


def test_all_of_the_reference_machines_run_one_after_another(folder):
    assert 0 == main(["bench", "--folder", str(folder)])
    assert "store[]mapped[]packs[]transfer[]generation[]peers[]" == ran(folder)


def test_those_of_a_gpu_machine_are_asked_for_by_a_flag(folder):
    assert 0 == main(["bench", "--gpu", "--folder", str(folder)])
    assert "gpu['--report']" == ran(folder)


def test_one_that_fails_is_named_and_the_others_run(folder, capsys):
    (folder / "packs.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "packs", "store", "--folder", str(folder)])

    assert 1 == ended.value.code
    assert "store[]" == ran(folder)
    assert "failed: packs" in capsys.readouterr().err


def test_a_name_that_is_none_is_refused_before_anything_runs(folder, capsys):
    assert REFUSED == main(["bench", "store", "nothing", "--folder", str(folder)])
    assert "nothing.py" in capsys.readouterr().err
    assert not (folder.parent / "ran").exists()


def test_without_a_checkout_it_says_so(tmp_path, capsys):
    assert REFUSED == main(["bench", "--folder", str(tmp_path)])
    assert "expected benches of a checkout: store" in capsys.readouterr().err


def test_every_bench_that_it_knows_is_in_the_checkout():
    place = command.Path(command.__file__).parents[3] / "bench"

    assert all((place / f"{name}.py").is_file() for name in (*command.REFERENCE, *command.GPU))
