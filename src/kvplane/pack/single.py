"""A whole session in one safetensors file, which the safetensors library opens.

layers.<i>.key, layers.<i>.value     [length, kv_heads, dim], rows in logical order
states.<name>                        of recurrent and convolution layers
__metadata__                         kvplane.format, kvplane.session (the document), kvplane.rows
"""

import os
import re
import struct
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvplane.errors import PackCorrupt, PackTooLarge, PackVersion, StorageError
from kvplane.pack.documents import SavedSession
from kvplane.pack.limits import DOCUMENT_NBYTES, FORMAT
from kvplane.pack.whole import Whole, rows_digest

if TYPE_CHECKING:
    from torch import Tensor

# the document and the tensors' names, with room
HEADER_NBYTES = 2 * DOCUMENT_NBYTES
_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(key|value)", re.ASCII)


def write_single(path: str | os.PathLike[str], whole: Whole) -> int:
    """Write a session's file, there whole or not at all; its bytes.

    Raises:
        StorageError: it could not be written; what was at `path` before is still there.
    """
    tensors: dict[str, Tensor] = {}
    for layer, (key, value) in whole.rows.items():
        tensors[f"layers.{layer}.key"] = key.contiguous()
        tensors[f"layers.{layer}.value"] = value.contiguous()
    tensors |= {f"states.{name}": tensor.contiguous() for name, tensor in whole.states.items()}
    metadata = {
        "kvplane.format": str(FORMAT),
        "kvplane.rows": rows_digest(whole),
        "kvplane.session": whole.saved.encoded().decode(),
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4()}.tmp")
    try:
        # rows reveal the prompt: nobody else reads them
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(0o600)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return target.stat().st_size
    except (OSError, SafetensorError) as error:
        raise StorageError(path=str(target), what=str(error)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def read_single(path: str | os.PathLike[str]) -> Whole:
    """A session of such a file, its rows verified.

    Raises:
        StorageError: it cannot be read.
        PackCorrupt, PackVersion, PackTooLarge: it is none, or was changed.
    """
    shown = os.fspath(path)
    try:
        _check_header(shown)
        with safe_open(shown, framework="pt") as file:
            metadata = file.metadata() or {}
            number = metadata.get("kvplane.format")
            if number != str(FORMAT):
                raise PackVersion(path=shown, expected=FORMAT, got=number)
            document = metadata.get("kvplane.session", "").encode()
            saved = SavedSession.decoded(document, shown)
            rows: dict[int, dict[str, Tensor]] = {}
            states: dict[str, Tensor] = {}
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                found = _LAYER.fullmatch(name)
                if found is not None:
                    rows.setdefault(int(found[1]), {})[found[2]] = file.get_tensor(name)
                elif name.startswith("states."):
                    states[name.removeprefix("states.")] = file.get_tensor(name)
                else:
                    raise PackCorrupt(path=shown, what=f"{name[:80]} is no layer's")
    except OSError as error:
        raise StorageError(path=shown, what=str(error)) from error
    except SafetensorError as error:
        raise PackCorrupt(path=shown, what=f"no safetensors file: {error}") from error
    if any(set(pair) != {"key", "value"} for pair in rows.values()):
        raise PackCorrupt(path=shown, what="a layer has keys or values only")
    whole = Whole(
        saved, {layer: (pair["key"], pair["value"]) for layer, pair in rows.items()}, states
    )
    if rows_digest(whole) != metadata.get("kvplane.rows"):
        raise PackCorrupt(path=shown, what="its rows are not those that were written")
    return whole


def _check_header(path: str) -> None:
    with Path(path).open("rb") as file:
        lead = file.read(8)
    nbytes = struct.unpack("<Q", lead)[0] if len(lead) == 8 else 0  # noqa: PLR2004
    if nbytes > HEADER_NBYTES:
        raise PackTooLarge(what=f"the header of {path}", limit=HEADER_NBYTES, got=nbytes)
