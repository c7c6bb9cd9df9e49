"""Which model made the rows: its fingerprint, and what identifies its weights."""

import weakref
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from kvplane.integrations.transformers import kinds
from kvplane.pack import Fingerprint, weights_of

# hashing every parameter is for models that came from nowhere; once a model
_HASHED: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def fingerprint_of(model: Any, *, weights: str | None = None) -> Fingerprint:  # noqa: ANN401 - any transformers model
    """The fingerprint of a model's rows.

    Args:
        model: of transformers.
        weights: what identifies its weights; None: `identity_of(model)`.

    Raises:
        GeometryError: a model that no store holds.
    """
    text = kinds.text_config(model.config)
    dtype = str(model.dtype).removeprefix("torch.")
    return Fingerprint.of(
        kinds.geometry_of(text, kinds.kinds_of(text), dtype),
        weights=weights or identity_of(model),
        config=model.config,
    )


def identity_of(model: Any) -> str:  # noqa: ANN401 - any transformers model
    """What identifies a model's weights: its hub revision, its files, or all its parameters.

    A model whose parameters were changed after loading needs a name of its own: pass `weights`.
    """
    revision = getattr(model.config, "_commit_hash", None)
    if revision:
        return f"rev:{revision}"
    folder = Path(str(getattr(model, "name_or_path", "") or ""))
    if str(folder) not in ("", ".") and folder.is_dir():
        return weights_of(folder)
    if model not in _HASHED:
        _HASHED[model] = _hashed(model)
    return _HASHED[model]


def _hashed(model: Any) -> str:  # noqa: ANN401 - any transformers model
    state = blake3()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        rows = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(memoryview(rows.numpy()))
    return "parameters:" + state.hexdigest()
