"""A configuration's fields by name, whether it is an object or a dict."""

from collections.abc import Mapping
from typing import Any

from kvplane.errors import GeometryError

MISSING = object()


class Fields:
    """One layer's view of a configuration, or the whole of it.

    Args:
        config: an object or a mapping.
        overrides: what one layer says instead.
    """

    def __init__(self, config: object, overrides: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._overrides = {} if overrides is None else overrides

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - whatever is in it
        """The field's value; `default` where it is absent or null."""
        value = self._overrides.get(name)
        if value is None and isinstance(self._config, Mapping):
            value = self._config.get(name)
        elif value is None:
            value = getattr(self._config, name, None)
        return default if value is None else value

    def size(self, name: str, default: object = MISSING) -> int:
        """A whole number of at least 1.

        Raises:
            GeometryError: it is absent without a default, or something else.
        """
        value = self.get(name, default)
        if value is MISSING:
            raise GeometryError(field=name, value=None, reason="must be given")
        if type(value) is not int or value < 1:
            reason = "must be a whole number of at least 1"
            raise GeometryError(field=name, value=value, reason=reason)
        return value
