"""Whether a store can take what an opening states: every difference is refused by its name."""

from collections.abc import Mapping
from typing import Any

from kvplane.geometry import ModelGeometry
from kvplane.pack.fingerprint import differences
from kvplane.pack.geometries import geometry_fields
from kvplane.transfer.errors import TransferRefused
from kvplane.transfer.opening import Opening

# every value of the first is one of the second
EXACT = frozenset({("float16", "float32"), ("bfloat16", "float32")})


def check_opening(
    opening: Opening,
    geometry: ModelGeometry,
    *,
    fingerprint: Mapping[str, Any] | None,
    max_context: int,
) -> None:
    """Refuse what this side's planes cannot hold bit for bit: TransferRefused.

    Args:
        opening: of the sender.
        geometry: of the store.
        fingerprint: parts of the model's that will go on; both sides state one, or neither.
        max_context: of the store.
    """
    _check_layers(geometry, opening.geometry)
    mine, theirs = geometry.dtype, opening.geometry.dtype
    if mine != theirs and (theirs, mine) not in EXACT:
        raise TransferRefused(field="dtype", expected=mine, got=theirs)
    _check_fingerprint(fingerprint, opening.fingerprint)
    if opening.position > max_context:
        raise TransferRefused(
            field="position", expected=f"at most {max_context}", got=opening.position
        )


def _check_layers(mine: ModelGeometry, theirs: ModelGeometry) -> None:
    expected, got = geometry_fields(mine)["layers"], geometry_fields(theirs)["layers"]
    if len(expected) != len(got):
        raise TransferRefused(field="geometry.layers", expected=len(expected), got=len(got))
    for layer, (facts, other) in enumerate(zip(expected, got, strict=True)):
        _refuse_first(differences(facts, other, f"geometry.layers[{layer}]"))


def _check_fingerprint(mine: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> None:
    if mine is None or theirs is None:
        if mine is not theirs:
            said = ["none" if parts is None else "one" for parts in (mine, theirs)]
            raise TransferRefused(field="fingerprint", expected=said[0], got=said[1])
        return
    _refuse_first(differences(_without_dtype(mine), _without_dtype(theirs)))


def _without_dtype(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts, with groups by what their ids say beside the dtype, which is stated apart."""
    groups = {name.rpartition(".")[0]: layers for name, layers in parts["groups"].items()}
    return {**parts, "groups": groups}


def _refuse_first(found: list[tuple[str, Any, Any]]) -> None:
    for field, expected, got in found:
        raise TransferRefused(field=field, expected=expected, got=got)
