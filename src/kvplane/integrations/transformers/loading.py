"""A model that a person names, with its words and what identifies its weights."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvplane.errors import ArgumentError, GeometryError
from kvplane.geometry import FULL, SLIDING
from kvplane.integrations.transformers import kinds
from kvplane.integrations.transformers.identity import fingerprint_of
from kvplane.models import nano
from kvplane.pack import Fingerprint

SHIPPED = "glimmer-nano"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How text becomes ids and back.

    Args:
        begin: ids that begin a new text.
        encode: text to ids, without those.
        pieces: ids one by one, to pieces of text that can be printed at once.
        stop_ids: ids that end a generation.
        name: recorded with a session, and only warned about.
        chat: messages to ids, where the model has a template.
    """

    begin: tuple[int, ...]
    encode: Callable[[str], list[int]]
    pieces: Callable[[Iterable[int]], Iterator[str]]
    stop_ids: tuple[int, ...]
    name: str
    chat: Callable[[list[dict[str, str]]], list[int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A loaded model.

    Args:
        name: what the person called it.
        model: transformers' model, in eval mode.
        words: its text.
        fingerprint: of its rows.
    """

    name: str
    model: Any
    words: Words
    fingerprint: Fingerprint


def load_model(name: str, *, dtype: str | None = None, device: str = "cpu") -> NamedModel:
    """The shipped model, a folder's, or a Hugging Face id's.

    Raises:
        GeometryError: the model is not hybrid, or has layers that no store holds.
        ArgumentError: no such model, dtype or device.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(argument="dtype", expected=str(sorted(DTYPES)), got=dtype)
    where = checked_device(device)
    if name == SHIPPED:
        model = nano.load_nano(dtype=DTYPES[dtype or "float32"], device=where)
        return _named(name, model, nano_words())
    return _pretrained(name, dtype, where)


def config_of(name: str) -> Any:  # noqa: ANN401 - any transformers config
    """A model's configuration, before any weight is read: ArgumentError."""
    from transformers import AutoConfig  # noqa: PLC0415

    path = nano.nano_path() if name == SHIPPED else name
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ArgumentError(
            argument="model",
            expected=f'"{SHIPPED}", a folder or an id',
            got=f"{name}: {first_line}",
        ) from error


def check_hybrid(config: Any, name: str) -> None:  # noqa: ANN401 - any transformers config
    """Refuse a model without both kinds of attention layers: GeometryError."""
    held = [kind for kind in kinds.kinds_of(kinds.text_config(config)) if kind.in_store]
    found = {FULL if kind.sliding_window is None else SLIDING for kind in held}
    if len(found) < 2:  # noqa: PLR2004 - one of each kind
        reason = f"is not a hybrid model: its attention layers are all {', '.join(found)}"
        raise GeometryError(field="model", value=name, reason=reason)


def checked_device(device: str) -> torch.device:
    """A device that works here: ArgumentError."""
    try:
        where = torch.device(device)
        torch.zeros(1, device=where)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ArgumentError(argument="device", expected="one that works", got=first_line) from error
    return where


def nano_words() -> Words:
    """Bytes are its words."""
    return Words(
        begin=(nano.BOS,),
        encode=nano.encode,
        pieces=_byte_pieces,
        stop_ids=(nano.EOS,),
        name="bytes",
    )


def _byte_pieces(ids: Iterable[int]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        if token < nano.BOS:
            yield decoder.decode(bytes([token]))
    yield decoder.decode(b"", final=True)


def _pretrained(name: str, dtype: str | None, device: torch.device) -> NamedModel:
    from transformers import AutoTokenizer  # noqa: PLC0415

    config = config_of(name)
    check_hybrid(config, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        chosen = DTYPES[dtype] if dtype else "auto"
        model = _class_for(config).from_pretrained(name, dtype=chosen)
        # transformers wraps `to` in a way that type checkers cannot follow
        torch.nn.Module.to(model, device)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ArgumentError(argument="model", expected="weights", got=first_line) from error
    return _named(name, model.train(mode=False), _tokenizer_words(tokenizer, model))


def _class_for(config: Any) -> Any:  # noqa: ANN401 - transformers' classes
    """The class that generates text; some models have one for text and pictures together only."""
    from transformers import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _named(name: str, model: Any, words: Words) -> NamedModel:  # noqa: ANN401
    check_hybrid(model.config, name)
    return NamedModel(name=name, model=model, words=words, fingerprint=fingerprint_of(model))


def _tokenizer_words(tokenizer: Any, model: Any) -> Words:  # noqa: ANN401
    stops = model.generation_config.eos_token_id
    if stops is None:
        stops = []
    begin = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def pieces(ids: Iterable[int]) -> Iterator[str]:
        said: list[int] = []
        shown = ""
        for token in ids:
            said.append(token)
            text = tokenizer.decode(said, skip_special_tokens=True)
            # a character that is not whole yet ends in the replacement character
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text

    def chat(messages: list[dict[str, str]]) -> list[int]:
        # as text first: what the template gives as ids differs between versions
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return encode(text)

    return Words(
        begin=begin,
        encode=encode,
        pieces=pieces,
        stop_ids=tuple(stops if isinstance(stops, Sequence) else [stops]),
        name=str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__,
        chat=chat if getattr(tokenizer, "chat_template", None) else None,
    )
