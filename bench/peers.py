"""Another store that runs on a CPU, beside ours: mlx-lm's caches, in an environment of their own.

Both are measured by this one command in alternating rounds, each in a process of its own, because
they cannot share one: a token into a wrapped ring and into a full plane, and a session saved and
loaded. mlx-lm neither verifies nor syncs what it writes, and ours does both: the page says so.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import ROOT, table, write

PINS = ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2")
ENVIRONMENT = ROOT / "build" / "peers"
CASES = ("ring", "full", "save", "load")
WORDS = {
    "ring": "a token into wrapped rings of 2,048, a layer of 8",
    "full": "a token into full planes of 8,192, a layer of 8",
    "save": "a session of 8,192 tokens saved",
    "load": "the same, loaded",
}
# as in peer_mlx.py
WINDOW, DEPTH, HEADS, DIM, RINGS, FULL, TOKENS, LAYERS = 2048, 8192, 2, 128, 6, 2, 100, 8


def ours(folder: Path) -> dict[str, float]:
    """Seconds of each case on the store."""
    import torch  # noqa: PLC0415 - the other environment has none

    from kvplane import KVStore, ModelGeometry  # noqa: PLC0415
    from kvplane.pack import Fingerprint, load, save  # noqa: PLC0415

    def session_of(kinds):
        geometry = ModelGeometry.uniform(
            kinds, sliding_window=WINDOW, num_kv_heads=HEADS, head_dim=DIM, dtype="float16"
        )
        session = KVStore(geometry, max_context=2 * DEPTH).open(tokens=[])
        chunk = torch.randn(2, 256, HEADS, DIM).half()
        while session.position < DEPTH:
            with session.step(list(range(256))) as step:
                for layer in range(len(kinds)):
                    step.write(layer, *chunk)
        return session

    def update(kind):
        session = session_of([kind] * LAYERS)
        row = torch.randn(2, 1, HEADS, DIM).half()
        begin = time.perf_counter()
        for _ in range(TOKENS):
            with session.step([1]) as step:
                for layer in range(LAYERS):
                    step.write(layer, *row)
                    step.view(layer)
        return (time.perf_counter() - begin) / TOKENS / LAYERS

    found = {"ring": update("sliding_attention"), "full": update("full_attention")}
    session = session_of(["sliding_attention"] * RINGS + ["full_attention"] * FULL)
    made_by = Fingerprint.of(session.geometry, weights="peers")
    begin = time.perf_counter()
    save(folder, "session", session, made_by)
    found["save"] = time.perf_counter() - begin
    begin = time.perf_counter()
    load(folder, "session", KVStore(session.geometry, max_context=2 * DEPTH), made_by)
    return found | {"load": time.perf_counter() - begin}


def measured(python: Path, script: Path, *arguments: str) -> dict[str, float]:
    """One round in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), str(script), *arguments, folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment() -> Path:
    """The Python of the peers' environment, made when it is not there."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PINS], check=True)
    return python


def said(seconds: list[float]) -> str:
    """Median and spread, in a unit that fits."""
    unit, scale = ("ms", 1e3) if statistics.median(seconds) >= 1e-3 else ("us", 1e6)
    middle, least, most = (
        scale * part for part in (statistics.median(seconds), min(seconds), max(seconds))
    )
    return f"{middle:.1f} {unit} ({least:.1f} to {most:.1f})"


def main() -> None:
    """Measure in rounds and write the page; `--ours FOLDER` is one round of the store's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="printed, not written")
    asked = parser.parse_args()
    if asked.ours is not None:
        print(json.dumps(ours(asked.ours)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    python = environment()
    here = Path(__file__).parent
    found: dict[str, list[dict[str, float]]] = {"kvplane": [], "mlx-lm": []}
    for number in range(1 if asked.quick else asked.rounds):
        calls = [
            ("kvplane", (Path(sys.executable), Path(__file__), "--ours")),
            ("mlx-lm", (python, here / "peer_mlx.py")),
        ]
        for name, (interpreter, script, *rest) in calls[:: 1 if number % 2 == 0 else -1]:
            found[name].append(measured(interpreter, script, *rest))
    rows = [
        [WORDS[case], *(said([part[case] for part in rounds]) for rounds in found.values())]
        for case in CASES
    ]
    page = table(["", *found], rows)
    page += (
        "\nmlx-lm writes one file, without syncing or checking it; kvplane writes blobs that are "
        f"synced, and verifies every byte when it loads. {', '.join(PINS)}; the session has "
        f"{RINGS} rings and {FULL} full planes. A store on MLX and one on PyTorch do not hand "
        "their rows to the same attention: read the columns as two programs, not as one."
    )
    if asked.quick:
        print(page)
        return
    write("peers", "Beside another store on a CPU", "kvplane bench peers", found, page)


if __name__ == "__main__":
    main()
