"""A configuration that is read as it stands, and short ways to change it."""

import pytest

from kvplane.errors import GeometryError
from kvplane.geometry import FULL, SLIDING, ModelGeometry

S, F = SLIDING, FULL

# a model that transformers does not know, so that its dict is read as it stands
PLAIN = {
    "model_type": "a_model_of_tomorrow",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": [S, S, S, F],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
MISSING = object()


def changed(**facts):
    """`PLAIN` with other facts; `MISSING` leaves a field out."""
    both = PLAIN | facts
    return {name: value for name, value in both.items() if value is not MISSING}


def read(**facts):
    """The geometry of `changed(**facts)`."""
    return ModelGeometry.from_config(changed(**facts))


def refusal(**facts):
    """The error that `changed(**facts)` is refused with."""
    with pytest.raises(GeometryError) as refused:
        read(**facts)
    return refused.value


def kinds(geometry):
    return [layer.kind for layer in geometry.layers]
