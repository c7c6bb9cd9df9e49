"""Write the seeds of the corpus: one good file of each kind, small.

python tests/fuzz/make_corpus.py
"""

import hashlib
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "kvpack")]

import suites  # noqa: E402

from kvplane.kvpack import Codec, encode_frame  # noqa: E402
from kvplane.pack.inventory import Kind, kind_of  # noqa: E402
from kvplane.pack.zstd_bytes import packed  # noqa: E402
from kvplane.storage import MemoryStorage  # noqa: E402
from saved_roots import make_root  # noqa: E402

CORPUS = Path(__file__).parent / "corpus"
LIMIT = 64 << 10


def main():
    storage = make_root(MemoryStorage(), lengths=(260, 3), cuts=(3, 256))
    folders = {
        Kind.SESSION: "manifest",
        Kind.CUT: "cut",
        Kind.NODE: "node",
        Kind.BLOB: "blob-header",
    }
    found = [
        (folders[kind_of(file)], storage.read(file, limit=1 << 24))
        for file in storage.list()
        if kind_of(file) in folders
    ]
    values = suites.fixture_values(Codec.RAW, chunks_sealed=False, pack_sealed=False)
    objects = ("state_declaration", "family", "schema", "manifest", "raw_frame", "lossless_frame")
    found += [("kvpack", values[name]) for name in (*objects, "chunk", "pack")]
    found += [("kvpack", suites.delta_chain()[2].manifest.encoded())]
    found += [("kvpack", encode_frame(Codec.LOSSLESS, bytes(300) + bytes(range(200))))]
    found += [
        ("kvpack", suites.fixture(chunks_sealed=True, pack_sealed=True).pack),
    ]
    found += [
        (folder, small)
        for folder, data in found
        if folder == "blob-header" and (small := packed(bytearray(data)))
    ]
    for folder, data in found:
        # blobs of one layer group are enough, and the smallest
        if len(data) <= LIMIT:
            path = CORPUS / folder / hashlib.sha256(data).hexdigest()[:16]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


if __name__ == "__main__":
    main()
