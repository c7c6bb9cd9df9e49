"""What rows depend on beside their tokens, and nothing else: a difference refuses, by its name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvplane.errors import ArgumentError, PackMismatch
from kvplane.geometry import LayerGroup, ModelGeometry
from kvplane.pack.encoding import canonical, digest, framed, is_text
from kvplane.pack.geometries import rotary_fields
from kvplane.pack.ids import facts_of
from kvplane.pack.limits import LAYERS
from kvplane.pack.values import exact, is_exact

# names, paths, versions, token ids, outputs, generation: rows do not depend on them
DENY = re.compile(
    r"^_|^(name_or_path|architectures|auto_map|transformers_version|dtype|torch_dtype|use_cache|"
    r"output_.*|return_dict.*|attn_implementation.*|id2label|label2id|num_labels|problem_type|"
    r"finetuning_task|.*_token_ids?|.*_token_index|is_encoder_decoder|chunk_size_feed_forward|"
    r"tie_encoder_decoder|gradient_checkpointing|initializer_range|.*_dropout|dropout.*|.*_pdrop|"
    r"task_specific_params|prefix|tokenizer_class|torchscript|cross_attention_.*|per_layer_config|"
    r"router_aux_loss_coef|max_length|min_length|do_sample|early_stopping|num_beams|"
    r"num_beam_groups|diversity_penalty|temperature|top_k|top_p|typical_p|repetition_penalty|"
    r"length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids|"
    r"num_return_sequences|remove_invalid_values|exponential_decay_length_penalty|"
    r"suppress_tokens|begin_suppress_tokens|max_new_tokens)$"
)
# said by every layer's rotary already, and by some versions of transformers here as well
SAID_BY_ROTARY = frozenset({"partial_rotary_factor"})
PARTS = frozenset(
    {"adapters", "config", "groups", "keys_rotated", "quantisation", "rotary", "weights"}
)
ROTARY = frozenset({"base", "convention", "dim", "scaling"})
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_READ_NBYTES = 1 << 22


@dataclass(frozen=True)
class Fingerprint:
    """What a pack's rows were made by.

    Args:
        parts: {"adapters", "config", "groups", "keys_rotated", "quantisation", "rotary",
            "weights"}, of JSON types without floats.

    Raises:
        ArgumentError: these are no parts.
    """

    parts: Mapping[str, Any]

    def __post_init__(self) -> None:
        problem = parts_problem(self.parts)
        if problem is not None:
            raise ArgumentError(argument="parts", expected="a fingerprint's parts", got=problem)

    @cached_property
    def hex(self) -> str:
        """The fingerprint: hex D(F("kvplane/fingerprint/1") F(JSON parts))."""
        return digest(framed(b"kvplane/fingerprint/1"), framed(canonical(self.parts))).hex()

    def check(self, other: Mapping[str, Any]) -> None:
        """Refuse other parts by the name of the first that differs: PackMismatch."""
        for field, expected, got in differences(self.parts, other):
            raise PackMismatch(field=field, expected=expected, got=got)

    def check_groups(self, groups: Sequence[LayerGroup]) -> None:
        """Refuse rows of other layer groups than the fingerprint's: PackMismatch."""
        held = {group.id: list(group.layers) for group in groups}
        for field, expected, got in differences(self.parts["groups"], held, "fingerprint.groups"):
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
            config: the transformers configuration; its text part counts. A mapping is taken as it
                stands: its defaults are not known here.
            adapters: what identifies each, in order.
            quantisation: of the weights or rows.
            keys_rotated: whether stored keys carry their rotary position.

        Raises:
            ArgumentError: nothing identifies the weights, or a value has no one form.
        """
        if not weights:
            raise ArgumentError(argument="weights", expected="what identifies them", got=weights)
        return cls(
            {
                "adapters": list(adapters),
                "config": {} if config is None else config_part(config),
                "groups": {group.id: list(group.layers) for group in geometry.groups},
                "keys_rotated": keys_rotated,
                "quantisation": quantisation,
                "rotary": {
                    str(layer): rotary_fields(facts.rotary)
                    for layer, facts in enumerate(geometry.layers)
                    if facts.owns_rows
                },
                "weights": weights,
            }
        )


def parts_problem(parts: object) -> str | None:
    """Why these are no fingerprint's parts; None when they are."""
    if not isinstance(parts, Mapping) or set(parts) != PARTS:
        return f"other fields than {', '.join(sorted(PARTS))}"
    if not is_exact(dict(parts)):
        return "a float, or text that UTF-8 does not have"
    groups, rotary = parts["groups"], parts["rotary"]
    good = {
        "adapters": _is_list(parts["adapters"], str),
        "config": isinstance(parts["config"], dict),
        "groups": isinstance(groups, dict) and bool(groups) and all(map(facts_of, groups)),
        "keys_rotated": isinstance(parts["keys_rotated"], bool),
        "quantisation": parts["quantisation"] is None or is_text(parts["quantisation"]),
        "rotary": isinstance(rotary, dict) and all(map(_is_rotary, rotary.values())),
        "weights": is_text(parts["weights"]) and parts["weights"] != "",
    }
    for field, fits in good.items():
        if not fits:
            return f"{field} = {str(parts[field])[:80]}"
    layers = [layer for named in groups.values() for layer in _ascending(named)]
    if len(set(layers)) < len(layers) or min(layers) < 0 or max(layers) >= LAYERS:
        return "groups whose layers are none, repeated or not ascending"
    if set(rotary) != {str(layer) for layer in layers}:
        return "rotary of other layers than the groups'"
    return None


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _ascending(layers: Any) -> list[int]:  # noqa: ANN401
    good = _is_list(layers, int) and bool(layers) and layers == sorted(layers)
    return layers if good else [-1]


def _is_rotary(value: object) -> bool:
    return value is None or (isinstance(value, dict) and set(value) == ROTARY)


def config_part(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """The part of a transformers configuration that rows depend on.

    Raises:
        ArgumentError: it is none, or a value has no one form.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    if hasattr(config, "to_diff_dict"):
        config = config.to_diff_dict()
    if not isinstance(config, Mapping):
        raise ArgumentError(argument="config", expected="a configuration", got=config)
    return {
        name: exact(_without_denied(value), name)
        for name, value in config.items()
        if value is not None and name not in SAID_BY_ROTARY and not DENY.search(name)
    }


def _without_denied(value: Any) -> Any:  # noqa: ANN401
    if not isinstance(value, Mapping):
        return value
    return {
        name: _without_denied(item) for name, item in value.items() if not DENY.search(str(name))
    }


def weights_of(folder: str | Path) -> str:
    """The identity of a folder's weight files: "files:", and a digest over names and digests.

    Raises:
        ArgumentError: it holds none, or cannot be read.
    """
    try:
        named = {path.name: path for path in Path(folder).iterdir()}
        parts = []
        for name in sorted(name for name in named if name.endswith(_WEIGHT_SUFFIXES)):
            parts += [framed(name.encode()), framed(_file_digest(named[name]))]
    except OSError as error:
        raise ArgumentError(
            argument="folder", expected="a folder of weight files", got=f"{folder}: {error}"
        ) from error
    if not parts:
        raise ArgumentError(argument="folder", expected="weight files in it", got=str(folder))
    return "files:" + digest(*parts).hex()


def _file_digest(path: Path) -> bytes:
    state = blake3()
    with path.open("rb") as file:
        while data := file.read(_READ_NBYTES):
            state.update(data)
    return bytes(state.digest())


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
