"""States of the layers that are not the store's, as they were when the last call ended.

Convolutions and linear attention keep one running state instead of rows: a call changes it in
place, and nothing older can be had from it. So that a call that dies between two layers leaves no
trace, the state before it is kept: small convolution states are copied, large recurrent ones are
set aside and the layer is given fresh memory for the next one.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvplane.errors import PackMismatch, PositionError

# how packs name a state
STATE = re.compile(r"layers\.(?P<layer>[0-9]+)\.(?P<kind>conv|recurrent)\.(?P<state>[0-9]+)")


class Writes(NamedTuple):
    """Which tensor it was, and how often it had been written to; None where nobody counts."""

    tensor: int
    number: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """All states when `position` tokens had been seen.

    Args:
        position: tokens seen.
        attributes: by layer: what the layer object held.
        writes: by layer: of each of its state tensors.
        tensors: those tensors, so that no other takes their place in memory.
    """

    position: int
    attributes: Mapping[int, dict[str, Any]]
    writes: Mapping[int, tuple[Writes, ...]]
    tensors: tuple[Tensor, ...]


class RunningStates:
    """Every layer of a cache that the store does not hold and that keeps something.

    Args:
        layers: transformers' own layer objects, by index; those that keep nothing are left out.
    """

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.layers = dict(layers)
        self._mark: Mark | None = None

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def marked(self) -> int | None:
        """The tokens seen at the last mark."""
        return None if self._mark is None else self._mark.position

    def mark(self, position: int) -> None:
        """Keep the states as they are now, after `position` tokens."""
        self._mark = Mark(
            position=position,
            attributes={layer: _kept(held) for layer, held in self.layers.items()},
            writes={layer: _writes(held) for layer, held in self.layers.items()},
            tensors=tuple(each for held in self.layers.values() for each in _tensors(held)),
        )

    def forget(self) -> None:
        """Forget the mark: there is nothing to go back to."""
        self._mark = None

    def changed(self) -> bool:
        """Whether any layer was written to since the mark."""
        mark = self._mark
        return mark is not None and any(
            _writes(held) != mark.writes[layer] for layer, held in self.layers.items()
        )

    def advanced(self) -> bool:
        """Whether every layer was written to since the mark, as far as can be told."""
        mark = self._mark
        if mark is None:
            return True
        return all(
            _writes(held) != mark.writes[layer]
            or any(writes.number is None for writes in mark.writes[layer])
            for layer, held in self.layers.items()
            if not _passed_by(held)
        )

    def before_recurrent(self, layer: int, state: int) -> None:
        """A recurrent state is about to be overwritten: set the one before it aside."""
        held = self.layers.get(layer)
        if held is None or self._mark is None:
            return
        kept = self._mark.attributes[layer].get("recurrent_states", {}).get(state)
        if kept is not None and held.recurrent_states[state] is kept:
            held.recurrent_states[state] = torch.empty_like(kept)

    def restore(self) -> None:
        """Put every layer back to the mark.

        Raises:
            PositionError: a kernel wrote into a state that was set aside; only a reset helps.
        """
        mark = self._mark
        if mark is None:
            return
        for layer, held in self.layers.items():
            kept = mark.attributes[layer].get("recurrent_states", {}).values()
            if not set(_writes_of(kept)) <= set(mark.writes[layer]):
                message = (
                    f"the state of layer {layer} at position {mark.position} was overwritten by a "
                    "call that did not end; reset the cache"
                )
                raise PositionError(message, position=mark.position)
            held.__dict__.update(mark.attributes[layer])
        self.mark(mark.position)

    def check_held(self, what: str, position: int) -> None:
        """Refuse `what` when a layer's state lives in the model, not in the cache.

        Raises:
            PositionError: names the layers. Nothing was changed.
        """
        outside = [layer for layer, held in self.layers.items() if _passed_by(held)]
        if outside and position:
            message = (
                f"{what}: the model itself keeps the states of layers {outside}, not its cache; "
                "nothing was changed"
            )
            raise PositionError(message, position=position)

    def check_croppable(self, position: int) -> None:
        """Refuse going back to `position` when some state cannot follow.

        Raises:
            PositionError: names the layers. Nothing was changed.
        """
        self.check_held("going back", position)
        stuck = [
            layer
            for layer, held in self.layers.items()
            if not held.is_croppable or not getattr(held, "record_past", True)
        ]
        if stuck:
            message = (
                f"position {position}: layers {stuck} keep one running state and cannot go back to "
                "an earlier token; nothing was changed"
            )
            raise PositionError(message, position=position)

    def crop(self, tokens_to_remove: int) -> None:
        """Let layers that record their past drop tokens, and what they need no longer."""
        for held in self.layers.values():
            if tokens_to_remove or getattr(held, "record_past", True):
                held.crop(tokens_to_remove)
        self.forget()

    def copies(self) -> dict[int, Any]:
        """Copies of all layers, for a fork."""
        return {layer: copy.deepcopy(held) for layer, held in self.layers.items()}

    def each(self, method: str, *args: object) -> None:
        """Call a method of every layer that has it; the mark is forgotten."""
        for held in self.layers.values():
            if hasattr(held, method):
                getattr(held, method)(*args)
        self.forget()

    def named(self) -> dict[str, Tensor]:
        """Every state by "layers.<i>.<name>", as packs hold them.

        Raises:
            PositionError: a layer keeps something that packs do not hold.
        """
        states = {}
        for layer, held in self.layers.items():
            if isinstance(held, CacheLayerMixin):
                message = f"layer {layer}, a {type(held).__name__}, cannot be saved"
                raise PositionError(message, position=self.marked or 0)
            for number, tensor in held.conv_states.items():
                if tensor is not None:
                    # a recorded past is not needed to go on
                    recent = tensor[..., -held.conv_kernel_size[number] :]
                    states[f"layers.{layer}.conv.{number}"] = recent.contiguous()
            for number, tensor in held.recurrent_states.items():
                if tensor is not None:
                    states[f"layers.{layer}.recurrent.{number}"] = tensor.contiguous()
        return states

    def put(self, states: Mapping[str, Tensor]) -> None:
        """Go on from states that were saved; the layers are new.

        Raises:
            PackMismatch: they are not those of these layers.
        """
        parts = [STATE.fullmatch(name) for name in states]
        found = sorted({int(part["layer"]) for part in parts if part is not None})
        if found != sorted(self.layers) or None in parts:
            raise PackMismatch(field="states", expected=sorted(self.layers), got=sorted(states))
        for part, tensor in zip(parts, states.values(), strict=True):
            if part is None:
                continue
            held, state = self.layers[int(part["layer"])], int(part["state"])
            what = f"{part['kind']}_states"
            if state >= held.number_of_states:
                raise PackMismatch(field="states", expected=held.number_of_states, got=state)
            held.lazy_initialization(**{what: tensor}, state_idx=state)
            getattr(held, what)[state].copy_(tensor)
            if part["kind"] == "conv":
                held.has_previous_state[state] = True
        self.forget()


def _passed_by(held: Any) -> bool:  # noqa: ANN401 - transformers' class
    """Whether calls pass the layer by: the model keeps its state itself."""
    return isinstance(held, LinearAttentionCacheLayerMixin) and not any(
        (*held.is_conv_states_initialized.values(), *held.is_recurrent_states_initialized.values())
    )


def _kept(held: Any) -> dict[str, Any]:  # noqa: ANN401 - transformers' class
    """A layer's attributes, such that later calls do not change them."""
    kept: dict[str, Any] = {}
    for name, value in held.__dict__.items():
        if name == "conv_states":
            # kernels roll convolution states in place
            kept[name] = {
                state: None if tensor is None else tensor.clone() for state, tensor in value.items()
            }
        else:
            kept[name] = dict(value) if isinstance(value, dict) else value
    return kept


def _tensors(held: Any) -> list[Tensor]:  # noqa: ANN401 - transformers' class
    found = [getattr(held, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        found.extend(getattr(held, name, {}).values())
    return [tensor for tensor in found if tensor is not None]


def _writes(held: Any) -> tuple[Writes, ...]:  # noqa: ANN401 - transformers' class
    return _writes_of(_tensors(held))


def _writes_of(tensors: Iterable[Tensor | None]) -> tuple[Writes, ...]:
    return tuple(
        # torch counts the writes to a tensor, except in inference mode
        Writes(id(tensor), None if tensor.is_inference() else tensor._version)  # noqa: SLF001
        for tensor in tensors
        if tensor is not None
    )
