"""What rows depend on beside their tokens, and nothing else: a difference refuses, by its name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvplane.errors import ArgumentError, PackMismatch
from kvplane.geometry import ModelGeometry
from kvplane.pack.encoding import canonical, digest, framed

# names, paths, versions, token ids, outputs and generation: rows do not depend on them
DENY = re.compile(
    r"^_|^(name_or_path|architectures|auto_map|transformers_version|model_type_version|dtype|"
    r"torch_dtype|use_cache|output_.*|return_dict.*|attn_implementation.*|id2label|label2id|"
    r"num_labels|problem_type|finetuning_task|.*_token_id|.*_token_index|bos_.*|eos_.*|pad_.*|"
    r"decoder_start_.*|is_encoder_decoder|chunk_size_feed_forward|tie_encoder_decoder|"
    r"gradient_checkpointing|initializer_range|.*_dropout|dropout.*|task_specific_params|prefix|"
    r"tokenizer_class|torchscript|cross_attention_.*|per_layer_config)$"
)
# fields that hold fractions by their meaning: 10000 and 10000.0 are one value
FLOATS = re.compile(
    r"(_eps|_theta|base|scaling|factor|multiplier|_scale|scale_factor|softcap\w*|_slope|_std|"
    r"temperature|scalar|attn_factor|beta_fast|beta_slow|mscale\w*|layer_rope_theta)$"
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_READ_NBYTES = 1 << 22


@dataclass(frozen=True)
class Fingerprint:
    """What a pack's rows were made by.

    Args:
        parts: {"adapters", "config", "groups", "keys_rotated", "quantisation", "rotary",
            "weights"}, of JSON types without floats.
    """

    parts: Mapping[str, Any]

    @cached_property
    def hex(self) -> str:
        """The fingerprint: hex D(F("kvplane/fingerprint/1") F(JSON parts))."""
        return digest(framed(b"kvplane/fingerprint/1"), framed(canonical(self.parts))).hex()

    def check(self, other: Mapping[str, Any]) -> None:
        """Refuse other parts by the name of the first that differs: PackMismatch."""
        for field, expected, got in differences(self.parts, other):
            raise PackMismatch(field=field, expected=expected, got=got)

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        *,
        weights: str,
        config: Any = None,  # noqa: ANN401 - any transformers config, or none
        adapters: Sequence[str] = (),
        quantisation: str | None = None,
        keys_rotated: bool = True,
    ) -> "Fingerprint":
        """The fingerprint of a model.

        Args:
            geometry: its layers, with the dtype of the rows.
            weights: what identifies them: a string of the caller's, or `weights_of(folder)`.
            config: the transformers configuration; its text part counts.
            adapters: what identifies each, in order.
            quantisation: of the weights or rows.
            keys_rotated: whether stored keys carry their rotary position.
        """
        if not weights:
            raise ArgumentError(argument="weights", expected="what identifies them", got=weights)
        rotary = {
            str(layer): None
            if facts.rotary is None
            else {
                "base": float(facts.rotary.base).hex(),
                "convention": facts.rotary.convention,
                "dim": facts.rotary.dim,
                "scaling": None
                if facts.rotary.scaling is None
                else exact(dict(facts.rotary.scaling)),
            }
            for layer, facts in enumerate(geometry.layers)
            if facts.owns_rows
        }
        return cls(
            {
                "adapters": list(adapters),
                "config": {} if config is None else config_part(config),
                "groups": {group.id: list(group.layers) for group in geometry.groups},
                "keys_rotated": keys_rotated,
                "quantisation": quantisation,
                "rotary": rotary,
                "weights": weights,
            }
        )


def config_part(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """The part of a transformers configuration that rows depend on."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    fields = config.to_diff_dict() if hasattr(config, "to_diff_dict") else dict(config)
    return {
        name: exact(value, name)
        for name, value in fields.items()
        if not DENY.search(name) and value is not None
    }


def exact(value: Any, name: str = "") -> Any:  # noqa: ANN401
    """A JSON value without floats: a float is the string of `float.hex()`."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, float) or (isinstance(value, int) and FLOATS.search(name)):
        return float(value).hex()
    if isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        return {
            str(key): exact(item, str(key))
            for key, item in value.items()
            if not DENY.search(str(key))
        }
    if isinstance(value, (list, tuple)):
        return [exact(item, name) for item in value]
    return str(value)


def weights_of(folder: str | Path) -> str:
    """ "files:" and a digest over the names and digests of a folder's weight files.

    Raises:
        ArgumentError: it holds none.
    """
    files = sorted(path for path in Path(folder).iterdir() if path.name.endswith(_WEIGHT_SUFFIXES))
    if not files:
        raise ArgumentError(argument="folder", expected="weight files in it", got=str(folder))
    parts = []
    for path in files:
        state = blake3()
        with path.open("rb") as file:
            while data := file.read(_READ_NBYTES):
                state.update(data)
        parts += [framed(path.name.encode()), framed(bytes(state.digest()))]
    return "files:" + digest(*parts).hex()


def differences(
    expected: Any,  # noqa: ANN401
    got: Any,  # noqa: ANN401
    field: str = "fingerprint",
) -> list[tuple[str, Any, Any]]:
    """Where two JSON values differ: (field, expected, got), in the order of the fields."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        found = []
        for name in sorted({*expected, *got}):
            found += differences(expected.get(name), got.get(name), f"{field}.{name}")
        return found
    return [] if expected == got else [(field, expected, got)]
