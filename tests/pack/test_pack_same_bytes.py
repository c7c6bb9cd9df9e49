"""Equal content has equal bytes and names, whatever the process, locale or order of insertion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_by_hand import Made

from kvplane.pack import Aux, Fingerprint, PrefixCache, save_session
from kvplane.storage import MemoryStorage

TESTS = Path(__file__).parents[1]
LIMIT = 1 << 26
AUX = (Aux(2, 5, "image", "a" * 64), Aux(3, 9, "größe", "b" * 64))


def backwards(value):
    """The same value with every object's keys in the other order."""
    if isinstance(value, dict):
        return {key: backwards(item) for key, item in reversed(value.items())}
    return value


def made_root(*, reverse=False):
    """A root's files by name: cuts, a session, nodes, everything but root.json's neighbours."""
    made = Made(8, 16, None)
    fingerprint = made.fingerprint
    if reverse:
        fingerprint = Fingerprint(backwards(dict(fingerprint.parts)))
        made.store.numerics = backwards(made.store.numerics)
    storage = MemoryStorage()
    prefixes = PrefixCache(storage, fingerprint)
    session = made.open(range(256))
    aux = AUX[::-1] if reverse else AUX
    prefixes.publish(session, aux=aux)
    made.extend(session, range(60), chunk=1)
    prefixes.publish(session, aux=list(aux))
    save_session(storage, "s", session, fingerprint, aux=aux, tokenizer="größe \u20ac \u7f51")
    return {name: storage.read(name, limit=LIMIT).hex() for name in storage.list()}


def test_the_order_in_which_things_were_inserted_makes_no_difference():
    assert made_root() == made_root(reverse=True)


@pytest.mark.parametrize(
    ("seed", "locale"), [("0", "C"), ("1", "C.UTF-8"), ("31415", "POSIX")], ids=str
)
def test_another_hash_seed_and_locale_make_no_difference(seed, locale):
    paths = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]"
    code = f"{paths}; import json, test_pack_same_bytes as t; print(json.dumps(t.made_root()))"
    env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, timeout=300
    )

    assert made_root() == json.loads(done.stdout.splitlines()[-1])
