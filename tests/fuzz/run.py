"""Fuzz one target with atheris, beginning with the corpus; what it finds is written to a folder.

python tests/fuzz/run.py manifest -max_total_time=600
"""

import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

with atheris.instrument_imports(include=["kvplane.pack", "kvplane.kvpack"]):
    from targets import TARGETS


def main():
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    new = Path(tempfile.gettempdir()) / "kvplane-fuzz" / name
    new.mkdir(parents=True, exist_ok=True)
    limits = ["-rss_limit_mb=2048", "-timeout=20", "-max_len=65536", f"-artifact_prefix={new}/"]
    corpus = [str(new), str(HERE / "corpus" / name)]
    atheris.Setup([sys.argv[0], *limits, *options, *corpus], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
