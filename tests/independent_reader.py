"""A second reader of packs, written from docs/format.md: it shares no code with kvplane."""

import base64
import json
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from safetensors.torch import load


def frame(part):
    return len(part).to_bytes(8, "little") + part


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def document(kind, path):
    fields = json.loads(path.read_bytes())
    assert canonical({**fields, "format": 1}) == path.read_bytes()
    own = fields.pop("self")
    body = frame(f"kvplane/{kind}/1".encode()) + frame(canonical(fields))
    assert own == blake3(body).hexdigest()
    return fields


def chain(fields, ids, stop, salt=b""):
    parent = frame(b"kvplane/root/1") + frame(salt) + frame(bytes.fromhex(fields["fingerprint"]))
    parent = blake3(parent).digest()
    for block, first in enumerate(range(0, stop, 256)):
        count = min(256, stop - first)
        aux = [item for item in fields["aux"] if item[0] < first + count and item[1] > first]
        data = np.array([block, count], dtype="<u8").tobytes()
        data += ids[first : first + count].tobytes() + len(aux).to_bytes(8, "little")
        for begin, end, what, digest in aux:
            data += np.array([begin, end], dtype="<u8").tobytes()
            data += frame(what.encode()) + frame(bytes.fromhex(digest))
        parent = blake3(frame(b"kvplane/block/1") + frame(parent) + data).digest()
    return parent.hex()


def tokens(fields):
    return np.frombuffer(base64.b64decode(fields["tokens"], validate=True), dtype="<u4")


def rows(root, fields):
    parts = {}
    for group, held in fields["groups"].items():
        for first, stop, name in held["spans"]:
            data = Path(root, "blobs", name[:2], f"{name}.safetensors").read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            said = json.loads(header["__metadata__"]["kvplane"])
            assert [group, name] == [said["group"], blake3(data).hexdigest()]
            part = slice(first - said["first"], stop - said["first"])
            for tensor, whole in load(data).items():
                parts.setdefault(tensor, []).append(whole[part])
    return {tensor: torch.cat(pieces) for tensor, pieces in parts.items()}
