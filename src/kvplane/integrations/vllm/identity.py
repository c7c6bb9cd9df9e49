"""Which model's rows an engine holds: the fingerprint that the transformers side computes too."""

from pathlib import Path
from typing import Any

from kvplane.errors import ArgumentError
from kvplane.geometry import ModelGeometry
from kvplane.integrations.transformers import kinds
from kvplane.pack import Fingerprint, weights_of


def fingerprint_of(
    config: Any,  # noqa: ANN401 - any transformers config
    *,
    dtype: str,
    weights: str,
    quantisation: str | None = None,
) -> tuple[ModelGeometry, Fingerprint]:
    """The layers and the fingerprint of a model.

    Args:
        config: of transformers, as its folder says it: not as an engine changed it.
        dtype: of keys and values.
        weights: what identifies them.
        quantisation: of the weights.

    Raises:
        GeometryError: a model that no store holds, or one with states beside rows.
    """
    text = kinds.text_config(config)
    geometry = kinds.geometry_of(text, kinds.kinds_of(text), dtype)
    return geometry, Fingerprint.of(
        geometry, weights=weights, config=config, quantisation=quantisation
    )


def weights_identity(model: str, *, given: str | None, revision: str | None) -> str:
    """What identifies an engine's weights: what it was told, the revision, or the files' digests.

    Raises:
        ArgumentError: a name without a revision.
    """
    if given:
        return given
    if Path(model).is_dir():
        return weights_of(model)
    if revision:
        return f"rev:{revision}"
    raise ArgumentError(
        argument="kv_connector_extra_config",
        expected='"weights", a model folder, or a revision: something identifies the weights',
        got=model,
    )
