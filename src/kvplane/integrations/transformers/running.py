"""States of the layers that are not the store's, as they were when the last call ended.

Convolutions and linear attention keep one running state instead of rows: a call changes it in
place, and nothing older can be had from it. So that a call that dies between two layers leaves no
trace, the state before it is kept: small convolution states are copied, large recurrent ones are
set aside and the layer is given fresh memory to write the next one into.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin

from kvplane.errors import PositionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """All states when `position` tokens had been seen.

    Args:
        position: tokens seen.
        states: by layer: the layer's attributes then.
        versions: by layer: how often each of its tensors had been written to.
    """

    position: int
    states: Mapping[int, dict[str, Any]]
    versions: Mapping[int, tuple[Any, ...]]


class RunningStates:
    """Every layer of a cache that the store does not hold and that keeps something.

    Args:
        layers: transformers' own layer objects, by index.
    """

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.layers = {
            layer: held for layer, held in layers.items() if not isinstance(held, DummyLayer)
        }
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
            states={layer: _kept(held) for layer, held in self.layers.items()},
            versions={layer: _versions(held) for layer, held in self.layers.items()},
        )

    def forget(self) -> None:
        """Forget the mark: there is nothing to go back to."""
        self._mark = None

    def advanced(self) -> bool:
        """Whether every layer has been written to since the mark.

        Unknown for tensors of inference mode, which do not count writes: then they say yes.
        """
        if self._mark is None:
            return True
        return all(
            _versions(held) != self._mark.versions[layer] or None in self._mark.versions[layer]
            for layer, held in self.layers.items()
            if not self._outside(held)
        )

    def before_recurrent(self, layer: int, state: int) -> None:
        """A recurrent state is about to be overwritten: set the one before it aside."""
        held = self.layers.get(layer)
        if held is None or self._mark is None:
            return
        kept = self._mark.states[layer].get("recurrent_states", {}).get(state)
        if kept is not None and held.recurrent_states[state] is kept:
            held.recurrent_states[state] = torch.empty_like(kept)

    def restore(self) -> None:
        """Put every layer back to the mark.

        Raises:
            PositionError: there is none, or a kernel wrote into what was set aside.
        """
        mark = self._mark
        if mark is None:
            return
        for layer, held in self.layers.items():
            kept = mark.states[layer].get("recurrent_states", {})
            before = mark.versions[layer]
            after = _versions_of(kept.values())
            if None not in before and after != before[-len(after) :] and after:
                self._lost(mark.position, [layer])
            held.__dict__.update(_kept_again(mark.states[layer]))
        self.mark(mark.position)

    def check_inside(self, what: str, position: int) -> None:
        """Refuse `what` when a layer's state lives in the model, not in the cache.

        Raises:
            PositionError: names the layers. Nothing was changed.
        """
        outside = [layer for layer, held in self.layers.items() if self._outside(held)]
        if outside and position:
            message = (
                f"{what}: the model itself keeps the states of layers {outside}, not its cache; "
                "nothing was changed"
            )
            raise PositionError(message, position=position)

    def check_croppable(self, position: int) -> None:
        """Refuse a crop that some state cannot follow.

        Raises:
            PositionError: names the layers. Nothing was changed.
        """
        self.check_inside("crop", position)
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
            if getattr(held, "record_past", True) or tokens_to_remove:
                held.crop(tokens_to_remove)
        self.forget()

    def copies(self) -> dict[int, Any]:
        """Copies of all layers, for a fork."""
        return {layer: copy.deepcopy(held) for layer, held in self.layers.items()}

    def each(self, what: str, *args: object) -> None:
        """Call a method of every layer that has it; what was marked is then forgotten."""
        for held in self.layers.values():
            if hasattr(held, what):
                getattr(held, what)(*args)
        self.forget()

    @staticmethod
    def _outside(held: Any) -> bool:  # noqa: ANN401 - transformers' class
        """Whether calls pass the layer by: its model keeps the state itself."""
        return isinstance(held, LinearAttentionCacheLayerMixin) and not any(
            (*held.is_conv_states_initialized.values(), *held.is_recurrent_states_initialized.values())
        )

    @staticmethod
    def _lost(position: int, layers: Sequence[int]) -> None:
        message = (
            f"the states of layers {list(layers)} at position {position} were overwritten by a call "
            "that did not end; reset the cache"
        )
        raise PositionError(message, position=position)


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


def _kept_again(states: dict[str, Any]) -> dict[str, Any]:
    return {
        name: dict(value) if isinstance(value, dict) else value for name, value in states.items()
    }


def _versions(held: Any) -> tuple[Any, ...]:  # noqa: ANN401 - transformers' class
    tensors: list[Tensor | None] = []
    for name in ("conv_states", "recurrent_states"):
        tensors.extend(getattr(held, name, {}).values())
    found = _versions_of(tensors)
    return (*(id(tensor) for tensor in tensors), *found)


def _versions_of(tensors: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any iterable
    return tuple(
        None if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001 - the count of writes has no other name
        for tensor in tensors
    )
