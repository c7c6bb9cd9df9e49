"""The model a person names: a preset, a config's path, or a Hugging Face id."""

import dataclasses
import re
from pathlib import Path

from kvplane.errors import GeometryError
from kvplane.geometry import ModelGeometry, preset_names


def geometry_of(model: str, *, dtype: str | None = None) -> ModelGeometry:
    """The geometry of a named model.

    Args:
        model: a preset; a `config.json` or its folder; or an id whose config is in the local
            Hugging Face cache or can be fetched.
        dtype: of the rows; None takes the model's own.

    Raises:
        GeometryError: it is none of these, or describes what is not supported.
    """
    if model in preset_names():
        geometry = ModelGeometry.preset(model)
        return geometry if dtype is None else dataclasses.replace(geometry, dtype=dtype)
    if Path(model).exists():
        return ModelGeometry.from_config(model, dtype=dtype)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return ModelGeometry.from_config(_fetched(model), dtype=dtype)
    return ModelGeometry.preset(model)


def _fetched(repository: str) -> str:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        try:
            return hf_hub_download(repository, "config.json", local_files_only=True)
        except LocalEntryNotFoundError:
            return hf_hub_download(repository, "config.json")
    except Exception as error:  # no network, no such repository, a gate: each has its own class
        first_line = str(error).strip().partition("\n")[0]
        reason = (
            "is no preset and no path, its config.json is not in the local Hugging Face cache, and "
            f"fetching it failed: {first_line}"
        )
        raise GeometryError(field="model", value=repository, reason=reason) from error
