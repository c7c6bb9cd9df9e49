"""The trained model that ships with kvplane, so that everything can be tried without a download."""

from kvplane.models.nano import (
    BOS,
    EOS,
    decode,
    encode,
    heldout_text,
    load_nano,
    nano_path,
)

__all__ = ["BOS", "EOS", "decode", "encode", "heldout_text", "load_nano", "nano_path"]
