"""Tiny random models of every class in the integration matrix, built offline in milliseconds.

    names()      the entries that the installed transformers has
    build(name)  one of them: seeded weights, evaluation mode, no end-of-text token
    text(...)    seeded token ids

Random weights of the usual size collapse into one repeated token and would prove nothing; these are
drawn with a standard deviation of 0.08, and `names` lists what each model's layers are.
"""

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zoo.models import COMMON, COMPOSITES, MODELS

VOCABULARY = COMMON["vocab_size"]
WINDOW = COMMON["sliding_window"]
# ids that no tiny model treats as padding, text boundary, picture or sound
FIRST_ID, STOP_ID = 3, 250


def names() -> list[str]:
    """The entries whose model class the installed transformers has and describes rightly."""
    installed = Version(transformers.__version__)
    return [
        name
        for name, entry in MODELS.items()
        if available(entry.model_type) and Version(entry.since) <= installed
    ]


def among(*wanted: str) -> list[str]:
    """Those of the entries that the installed transformers has."""
    present = names()
    return [name for name in wanted if name in present]


def available(model_type: str) -> bool:
    """Whether the installed transformers knows a model type."""
    return model_type in CONFIG_MAPPING


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    attention: str | None = None,
    config: Any = None,
) -> Any:
    """A fresh model of an entry in evaluation mode, the same weights every time.

    Args:
        name: a key of `MODELS`.
        dtype: of weights and activations.
        attention: transformers' attention implementation; None takes the class's default.
        config: None takes `configuration(name)`.
    """
    model = _built(name, configuration(name) if config is None else config)
    model = model.to(dtype)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def _built(name: str, config: Any) -> Any:
    entry = MODELS[name]
    class_name = (
        COMPOSITES.get(entry.model_type) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[entry.model_type]
    )
    model = getattr(transformers, class_name)(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, entry.deviation, generator=generator)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx].normal_(0, entry.deviation, generator=generator)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def configuration(name: str) -> Any:
    """The tiny config of an entry."""
    entry = MODELS[name]
    config_class = CONFIG_MAPPING[entry.model_type]
    if entry.model_type not in COMPOSITES:
        return config_class(**_options(config_class, entry.options))
    whole = config_class()
    parts = {}
    for part, options in entry.parts.items():
        part_class = type(getattr(whole, part))
        common = part_class if part == "text_config" else object
        parts[part] = part_class(**_options(common, options))
    return config_class(**parts, **entry.options)


def _options(config_class: type, own: dict[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(config_class.__init__).parameters)
    return {key: value for key, value in COMMON.items() if key in known} | own


def text(length: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Seeded ids, `[batch, length]`, varied and free of special tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(FIRST_ID, STOP_ID, (batch, length), generator=generator)
