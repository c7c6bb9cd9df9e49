"""Where the commands keep sessions: `$KVPLANE_HOME`, or the platform's data folder."""

import os
from pathlib import Path

VARIABLE = "KVPLANE_HOME"


def home() -> Path:
    """The folder; it may not exist yet."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    import platformdirs  # noqa: PLC0415 - only where nothing was named

    return Path(platformdirs.user_data_dir("kvplane", appauthor=False))
