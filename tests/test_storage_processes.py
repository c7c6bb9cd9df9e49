import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from kvplane.errors import SessionLocked
from kvplane.storage import open_storage

SESSION = "sessions/chat.json"


def tree(root):
    """Every file below a folder, with its bytes; temporaries too."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def run_python(source, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_that_put_one_name_leave_one_of_the_two_whole(tmp_path):
    source = """
import sys
from kvplane.storage import open_storage
storage, mine = open_storage(sys.argv[1]), sys.argv[2].encode() * 100_000
print("ready", flush=True)
sys.stdin.readline()
print(sum(storage.put(f"blobs/{n}", mine) for n in range(40)), flush=True)
"""
    writers = [run_python(source, tmp_path, letter) for letter in "ab"]
    for writer in writers:
        writer.stdout.readline()
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    stored = [int(writer.communicate()[0]) for writer in writers]
    files = tree(tmp_path)

    assert 40 == sum(stored)
    assert {f"blobs/{n}" for n in range(40)} == set(files)
    assert stored == [
        sum(data == letter * 100_000 for data in files.values()) for letter in (b"a", b"b")
    ]


def test_two_processes_that_replace_one_name_leave_no_mixture(tmp_path):
    source = """
import sys
from kvplane.storage import open_storage
storage, mine = open_storage(sys.argv[1]), sys.argv[2].encode() * int(sys.argv[3])
for _ in range(30):
    storage.replace("sessions/chat.json", mine)
    seen = storage.read("sessions/chat.json", limit=100_000)
    assert len(set(seen)) == 1 and len(seen) in (70_000, 90_000), len(seen)
"""
    writers = [run_python(source, tmp_path, "a", 70_000), run_python(source, tmp_path, "b", 90_000)]
    for writer in writers:
        writer.communicate()

    assert [0, 0] == [writer.returncode for writer in writers]
    assert {SESSION: tree(tmp_path)[SESSION]} == tree(tmp_path)


HOLD = """
import sys
from kvplane.storage import open_storage
lock = open_storage(sys.argv[1]).lock("chat")
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_lock_of_another_process_is_refused_by_name_and_ends_with_its_life(tmp_path):
    storage = open_storage(tmp_path)
    with run_python(HOLD, tmp_path) as holder:
        assert "held\n" == holder.stdout.readline()
        with pytest.raises(SessionLocked, match="in use by process") as refused:
            storage.lock("chat")
        holder.kill()

    assert holder.pid == refused.value.pid
    assert os.uname().nodename == refused.value.host
    assert abs(time.time() - datetime.fromisoformat(refused.value.since).timestamp()) < 60
    storage.lock("chat").release()


@pytest.mark.parametrize(
    "said", [b"", b"\xff", b"[" * 4000, b"[]", b'{"host":1,"pid":"x"}', b"{" + b" " * 9000]
)
def test_a_holder_that_says_nonsense_is_still_the_holder(tmp_path, said):
    storage = open_storage(tmp_path)
    with storage.lock("chat"):
        (tmp_path / "locks" / "chat").write_bytes(said)
        with pytest.raises(SessionLocked, match="process 0 on unknown since unknown"):
            storage.lock("chat")


def test_a_released_lock_is_free_although_a_forked_child_still_has_its_file(tmp_path):
    # in a process of its own: this one has threads, and a fork would copy their locks
    source = """
import os, sys
from kvplane.errors import SessionLocked
from kvplane.storage import open_storage
storage = open_storage(sys.argv[1])
lock = storage.lock("chat")
ready, stop = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    lock.release()  # a copy of the parent's hold: not its to end
    os.write(ready[1], b"x")
    os.read(stop[0], 1)
    os._exit(0)
other = os.fork()
if other == 0:
    os.read(stop[0], 1)
    os._exit(0)
os.read(ready[0], 1)
try:
    storage.lock("chat")
    print("the child ended it")
except SessionLocked:
    lock.release()
    storage.lock("chat").release()
    print("free")
finally:
    os.write(stop[1], b"xx")
os.waitpid(child, 0)
os.waitpid(other, 0)
"""
    with run_python(source, tmp_path) as process:
        assert "free\n" == process.communicate()[0]
