"""Values of configurations as JSON without floats: one number has one form, whoever wrote it.

A float is the string of Python's `float.hex()`. Whether a number is a float is its field's affair:
`rope_theta: 10000` and `rope_theta: 10000.0` are one value.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from kvplane.errors import ArgumentError
from kvplane.pack.encoding import is_text
from kvplane.pack.limits import INTEGER_STOP

# fields that hold fractions by their meaning
FLOATS = re.compile(
    r"(_eps|epsilon|_theta|_freq|base|scaling|factor|multiplier|_scale|_scalar|softcap\w*|_slope|"
    r"_std|_ratio|_limit|_noise|_coef|_alpha|_beta|temperature|beta_fast|beta_slow|mscale\w*|"
    r"sparsity\w*)$"
)


def exact(value: Any, name: str = "") -> Any:  # noqa: ANN401 - any value of a configuration
    """A value as JSON without floats.

    Args:
        value: of JSON types, tuples and dtypes.
        name: its field's, which says whether a whole number is a float.

    Raises:
        ArgumentError: something that has no one form.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _number(value, name)
    if isinstance(value, str):
        if not is_text(value):
            raise ArgumentError(argument=name or "value", expected="text in UTF-8", got=value)
        return value
    if isinstance(value, Mapping):
        return {str(key): exact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [exact(item, name) for item in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    raise ArgumentError(argument=name or "value", expected="a value with one form", got=value)


def _number(value: float, name: str) -> int | str:
    if isinstance(value, int) and not FLOATS.search(name):
        if not -INTEGER_STOP < value < INTEGER_STOP:
            raise ArgumentError(argument=name or "value", expected="below 2^53", got=value)
        return value
    if math.isnan(value):
        raise ArgumentError(argument=name or "value", expected="a number", got=value)
    return float(value).hex()


def is_exact(value: object) -> bool:
    """Whether a value is JSON without floats, of text in UTF-8 and numbers below 2^53."""
    if value is None or isinstance(value, bool):
        return True
    if type(value) is int:
        return -INTEGER_STOP < value < INTEGER_STOP
    if isinstance(value, dict):
        return all(is_text(key) and is_exact(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_exact, value))
    return is_text(value)
