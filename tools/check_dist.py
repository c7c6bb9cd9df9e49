"""Build the wheel and the sdist twice from different copies of the tree, and compare the bytes.

    python tools/check_dist.py [FOLDER]      # what was built lies in FOLDER, by default dist/

Also: the wheel that is built from the sdist is the same, everything a program needs is in it, and
nothing else is.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = (
    "kvplane/py.typed",
    "kvplane/presets/muse-glimmer-30b.json",
    "kvplane/models/glimmer_nano/model.safetensors",
    "kvplane/models/glimmer_nano/LICENSE-DATA",
    "kvplane/inspect/page.css",
    "kvplane/inspect/page.js",
)


def copied(folder: Path, *, umask: int, day: int) -> Path:
    """The tracked files elsewhere, made under another umask at another time."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    before = os.umask(umask)
    try:
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target)
                os.utime(target, (86_400 * day, 86_400 * day))
    finally:
        os.umask(before)
    return folder


def built(tree: Path, out: Path, *kinds: str) -> dict[str, bytes]:
    """What building gives, by file name."""
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(out)]
    subprocess.run([*command, str(tree)], check=True, capture_output=True)
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


def findings(
    one: dict[str, bytes], two: dict[str, bytes], again: dict[str, bytes]
) -> Iterator[str]:
    """Whatever is not as it should be."""
    if set(one) != set(two) or len(one) != 2:  # a wheel and an sdist
        yield f"built {sorted(one)}, then {sorted(two)}"
    yield from (f"{name}: two builds differ" for name in one if one[name] != two.get(name))
    yield from (f"{name}: not the sdist's" for name in again if again[name] != one.get(name))


def missing(wheel: Path) -> Iterator[str]:
    """What a wheel lacks, or has beyond the package."""
    names = zipfile.ZipFile(wheel).namelist()
    yield from (f"the wheel lacks {name}" for name in NEEDED if name not in names)
    for name in names:
        if not name.startswith("kvplane/") and ".dist-info/" not in name:
            yield f"the wheel has {name}"
        if name.endswith((".pyc", ".so")):
            yield f"the wheel has {name}"


def main() -> int:
    """Build, compare, and say what differs; whether anything did is the exit status."""
    dist = Path(sys.argv[1] if sys.argv[1:] else ROOT / "dist")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = copied(folder / "one", umask=0o022, day=20_000)
        second = copied(folder / "two" / "elsewhere", umask=0o077, day=10_000)
        one = built(first, folder / "out-one")
        two = built(second, folder / "out-two")
        sdist = next(file for file in (folder / "out-one").iterdir() if file.suffix == ".gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        unpacked = next((folder / "unpacked").iterdir())
        again = built(unpacked, folder / "out-again", "--wheel")
        dist.mkdir(exist_ok=True)
        for file in (folder / "out-one").iterdir():
            shutil.copyfile(file, dist / file.name)
    found = list(findings(one, two, again))
    for file in sorted(dist / name for name in one):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")
        if file.suffix == ".whl":
            found += missing(file)
    for finding in found:
        print(finding)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
