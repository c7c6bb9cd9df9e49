"""Kill a saving process at any instant, again and again: the old session or the new one is there.

python tests/torture/sigkill.py --kills 300 --root FOLDER

A process that has imported everything forks one that saves, waits for a random part of a save's
time, sends SIGKILL, and looks: every row of the session is right, no position that was said to be
saved is lost, a prompt finds a whole cut, and a sweep leaves nothing that nobody names.
"""

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from told_rows import LIMIT, go_on, matched, resumed  # noqa: E402

from kvplane.pack import open_root  # noqa: E402
from kvplane.pack.inventory import Kind, documents, kind_of  # noqa: E402
from kvplane.pack.sweep import sweep  # noqa: E402
from saved_roots import new_store  # noqa: E402


def save_until_killed(root, seed, said):
    """Go on with the session, a few tokens at a time, and say each position that is saved."""
    storage = open_root(root, create=True)
    draw = random.Random(os.getpid())
    while True:
        session = resumed(storage, "s", seed) or new_store().open(tokens=[])
        if session.position > LIMIT:
            session.close()
            session = new_store().open(tokens=[])
        while session.position <= LIMIT:
            go_on(storage, session, "s", seed, draw.randrange(1, 90))
            os.write(said, session.position.to_bytes(4, "little"))
        session.close()


def killed(root, seed, delay):
    """The last position that a process said it had saved before it was killed."""
    told, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        try:
            save_until_killed(root, seed, said)
        finally:
            os._exit(3)
    os.close(said)
    try:
        # the first save is over: what follows is the time that is drawn from
        heard = os.read(told, 4)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"the process ended by itself: {status}")
        while more := os.read(told, 1 << 16):
            heard += more
    finally:
        os.close(told)
    return int.from_bytes(heard[-4:], "little") if heard else 0


def look(root, seed, last):
    """Nothing, when what is there is whole and not older than what was said."""
    storage = open_root(root)
    session = resumed(storage, "s", seed)
    if session is None:
        raise SystemExit("the session is gone")
    position = session.position
    session.close()
    # a session begun anew may be shorter than the one that was said last
    if position < last <= LIMIT - 90:
        raise SystemExit(f"position {last} was said to be saved, {position} is there")
    bad = [one.file for one in documents(storage) if one.error is not None]
    if bad:
        raise SystemExit(f"damaged: {bad}")
    return matched(storage, seed, position + 1)


def clean(root):
    """Nothing, when a sweep takes everything that nobody names."""
    sweep(open_root(root), age_s=0, clock=lambda: time.time() + 86_402, wait=lambda _: None)
    storage = open_root(root)
    named = set().union(*(one.content.state.blobs for one in documents(storage)))
    blobs = [file for file in storage.list() if kind_of(file) is Kind.BLOB]
    left = list((Path(root) / ".tmp").iterdir())
    if len(named) != len(blobs) or left or storage.list("swept"):
        raise SystemExit(f"{len(blobs)} blobs, {len(named)} named, {len(left)} temporaries")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--root", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    began = time.monotonic()
    hits = 0
    for number in range(options.kills):
        last = killed(options.root, options.seed, draw.uniform(0, 0.15))
        hits += look(options.root, options.seed, last) > 0
        if number % 10 == 9 or number == options.kills - 1:
            clean(options.root)
    seconds = time.monotonic() - began
    print(f"{options.kills} kills in {seconds:.0f} s, {hits} prompts found a cut: all whole")  # noqa: T201


if __name__ == "__main__":
    main()
