"""A session saved here goes on in another process: the next 64 tokens' logits, bit for bit.

At every position of the exactness gates, with windows of 32 to 513, several groups, slack 0 and 16,
in both orders of attention.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_model import HybridModel, text
from kvplane.pack import Fingerprint, PrefixCache, load_session, open_root, save_session
from kvplane.storage import MemoryStorage

TESTS = Path(__file__).parents[1]
# the next 64 tokens: alone, as an answer is said, then a few at a time
CALLS = [1] * 16 + [8] * 6
CASES = {
    "32, slack 0": ((32,), {}),
    "32, slack 16": ((32,), {"slack": 16}),
    "64, physical order": ((64,), {"attention": "physical"}),
    "128": ((128,), {}),
    "129, slack 16": ((129,), {"slack": 16}),
    "513": ((513,), {}),
    "32, 64 and 129": ((32, 64, 129), {"slack": 16}),
}


def positions_of(windows):
    """Where a session ends: 1, 31 to 33, and around one and two windows."""
    ends = {1, 31, 32, 33}
    for window in windows:
        ends |= {window + step for step in (-1, 0, 1)}
        ends |= {2 * window + step for step in (-1, 0, 1)}
    return sorted(ends)


def model_of(case):
    windows, options = CASES[case]
    model = HybridModel(4, *windows, dtype="float16")
    return model, model.store(max_context=2048, **options)


def fingerprint_of(model):
    return Fingerprint.of(model.geometry, weights="seed 0")


def went_on(model, session):
    """Logits of the next 64 tokens; the session is closed."""
    found = []
    for count in CALLS:
        first = session.position
        found.append(model.call(session, text(first + count)[first:]))
    session.close()
    return torch.cat(found)


def root_of(folder, case):
    return folder / f"root-{list(CASES).index(case)}"


def go_on(folder):
    """What the other process does: resume everything, by name and by prefix, and go on."""
    torch.set_num_threads(1)
    found = {}
    for case, (windows, _) in CASES.items():
        model, store = model_of(case)
        storage = open_root(root_of(Path(folder), case))
        prefixes = PrefixCache(storage, fingerprint_of(model))
        for position in positions_of(windows):
            saved, loaded = load_session(storage, f"s{position}", store, fingerprint_of(model))
            found[case, position, "session"] = went_on(model, loaded.session)
            _, loaded = prefixes.load([*saved.tokens, 0], store)
            found[case, position, "cut"] = went_on(model, loaded.session)
    torch.save(found, Path(folder) / "logits.pt")


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    """By case and position: of the undisturbed session here; of the other process by name too."""
    folder = tmp_path_factory.mktemp("exact")
    found = {}
    for case, (windows, _) in CASES.items():
        model, store = model_of(case)
        storage = open_root(root_of(folder, case), create=True)
        prefixes = PrefixCache(storage, fingerprint_of(model))
        session = store.open([])
        for position in positions_of(windows):
            model.prefill(session, text(position)[session.position :])
            save_session(storage, f"s{position}", session, fingerprint_of(model))
            prefixes.publish(session)
            found[case, position, "here"] = went_on(model, session.fork())
    paths = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]"
    code = f"{paths}; import test_pack_exact; test_pack_exact.go_on({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)
    return {**found, **torch.load(folder / "logits.pt")}


@pytest.mark.parametrize("case", CASES)
def test_a_session_goes_on_in_another_process_as_if_it_had_not_stopped(logits, case):
    for position in positions_of(CASES[case][0]):
        here = logits[case, position, "here"]

        assert sum(CALLS) == len(here)
        assert torch.equal(here, logits[case, position, "session"]), position


@pytest.mark.parametrize("case", [case for case in CASES if "physical" not in case])
def test_a_cut_goes_on_in_another_process_as_its_producer_did(logits, case):
    # its rows may lie elsewhere in the rings: in blocked order that changes no bit
    for position in positions_of(CASES[case][0]):
        here = logits[case, position, "here"]

        assert torch.equal(here, logits[case, position, "cut"]), position


def test_a_cold_run_and_one_from_a_strict_cut_agree_on_the_canonical_schedule():
    model, store = model_of("32, 64 and 129")
    prefixes = PrefixCache(open_root(MemoryStorage(), create=True), fingerprint_of(model))
    ids = text(700)
    first = store.open([])
    model.prefill(first, ids[:512])
    prefixes.publish(first)
    model.decode(first, [7, 8])
    prefixes.publish(first)
    cold = store.open([])
    expected = model.prefill(cold, ids)
    match, loaded = prefixes.load(ids, store, strict=True, remember=True)
    warm = model.prefill(loaded.session, ids[match.position :])

    assert 512 == match.position
    assert torch.equal(expected[512:], warm)
    assert torch.equal(went_on(model, cold), went_on(model, loaded.session))
