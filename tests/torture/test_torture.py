"""Processes that are killed, and processes that meet; short here, long by `make torture`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "object"))

import s3_server

HERE = Path(__file__).parent
TORTURE = bool(os.environ.get("KVPLANE_TORTURE"))


def start(script, *words, environment=None):
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
    )


def finished(*processes):
    """What each said, once all have ended well."""
    said = [process.communicate(timeout=580)[0] for process in processes]
    assert [0] * len(processes) == [process.returncode for process in processes], said
    return said


def test_killed_at_any_instant_a_reader_finds_the_old_session_or_the_new(tmp_path):
    kills = 300 if TORTURE else 8
    (said,) = finished(start("sigkill.py", "--kills", kills, "--root", tmp_path / "root"))

    assert f"{kills} kills" in said


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.slow)])
def test_processes_that_save_and_load_the_same_prefixes_read_what_is_whole(tmp_path, kind):
    processes, seconds = (8, 60) if TORTURE else (2, 1)
    with s3_server.served() as server:
        environment = server.environment()
        root = tmp_path / "root" if kind == "folder" else f"s3://{server.bucket()}/root"
        words = ("--root", root, "--seconds", seconds)
        crowd = [
            start("crowd.py", *words, "--number", number, environment=environment)
            for number in range(processes)
        ]
        said = finished(*crowd)

    assert all("saves" in one for one in said)
