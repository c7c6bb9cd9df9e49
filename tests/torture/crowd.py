"""One of several processes that save and load the same prefixes in one root, for a while.

python tests/torture/crowd.py --root ROOT --seconds 60 --number 3
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from told_rows import go_on, matched, resumed  # noqa: E402

from kvplane.errors import PackMissing, SessionLocked  # noqa: E402
from kvplane.pack import open_root  # noqa: E402
from kvplane.pack.sweep import sweep  # noqa: E402
from saved_roots import new_store  # noqa: E402


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--number", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.number)
    storage = open_root(options.root, create=True)
    end = time.monotonic() + options.seconds
    saves = loads = 0
    mine = f"s{options.number % 4}"
    while time.monotonic() < end:
        session = new_store().open(tokens=[])
        try:
            # the same texts as everybody's, so that names and prefixes meet
            for _ in range(draw.randrange(1, 4)):
                go_on(storage, session, mine, 0, draw.choice((5, 64, 256)))
                saves += 1
        finally:
            session.close()
        matched(storage, 0, draw.randrange(2, 900))
        try:
            loaded = resumed(storage, f"s{draw.randrange(4)}", 0)
        except PackMissing:
            # a sweeper has it aside for an instant
            loaded = None
        if loaded is not None:
            loads += 1
            loaded.close()
        if options.number == 0:
            try:
                sweep(storage, age_s=1, wait=lambda _: time.sleep(0.05))
            except SessionLocked:
                continue
    print(f"{saves} saves, {loads} loads")  # noqa: T201


if __name__ == "__main__":
    main()
