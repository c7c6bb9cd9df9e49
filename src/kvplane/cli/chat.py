"""`kvplane chat`: turns of a conversation with a model that has a chat template."""

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from kvplane.errors import ArgumentError, PackError, PositionError
from kvplane.home import home

if TYPE_CHECKING:
    from kvplane.integrations.transformers.conversation import Conversation
    from kvplane.integrations.transformers.loading import NamedModel

Message = dict[str, str]


def chat(
    model: str,
    /,
    *,
    max_new_tokens: int = 400,
    temperature: float = 0.7,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    max_context: int | None = None,
    prompt_cache: str | None = None,
) -> None:
    """Talk to a model that has a chat template, one line a turn; an empty line ends.

    What was read and said stays in the cache from turn to turn. With --prompt-cache, another
    conversation that begins like an earlier one does not read its beginning again.

    Example: kvplane chat google/gemma-3-1b-it

    Args:
        model: A folder, or an id of any hybrid causal model with a chat template.
        max_new_tokens: Tokens to say in a turn.
        temperature: 0 takes the likeliest.
        seed: Of the drawing, above temperature 0.
        dtype: float32, bfloat16 or float16; the model's own unless given.
        device: cpu, cuda, ...
        max_context: Positions end below it; the model's own unless given.
        prompt_cache: A root of prefixes; the commands' own folder unless given.
    """
    import torch  # noqa: PLC0415 - seconds

    from kvplane.integrations.transformers.conversation import converse  # noqa: PLC0415
    from kvplane.integrations.transformers.loading import load_model  # noqa: PLC0415
    from kvplane.pack import PrefixCache  # noqa: PLC0415

    named = load_model(model, dtype=dtype, device=device)
    if named.words.chat is None:
        raise ArgumentError(
            argument="model",
            expected="one with a chat template (kvplane run needs none)",
            got=model,
        )
    prefixes = PrefixCache(prompt_cache or home() / "chats", named.fingerprint)
    talk = converse(named, prefixes=prefixes, max_context=max_context)
    generator = torch.Generator().manual_seed(seed)
    messages: list[Message] = []
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with contextlib.suppress(EOFError):
        while line := input("> " if sys.stdin.isatty() else ""):
            messages.append({"role": "user", "content": line})
            talk = turn(talk, named, named.words.chat(messages), notes)
            pieces = []
            said = talk.say(max_new_tokens, temperature=temperature, generator=generator)
            for piece in named.words.pieces(said):
                sys.stdout.write(piece)
                sys.stdout.flush()
                pieces.append(piece)
            sys.stdout.write("\n")
            sys.stdout.flush()
            messages.append({"role": "assistant", "content": "".join(pieces)})
            talk.publish()


def turn(
    talk: "Conversation", named: "NamedModel", ids: Sequence[int], notes: Console
) -> "Conversation":
    """Read what a turn adds; where the template changed what was said, go back to where it agrees.

    Returns:
        The conversation that goes on: another one, from the deepest cut, when rings or states could
        not go back that far.
    """
    from kvplane.integrations.transformers.conversation import converse  # noqa: PLC0415
    from kvplane.integrations.transformers.prompts import common  # noqa: PLC0415

    held = talk.ids
    agreed = common(held, ids)
    if agreed < len(held):
        try:
            talk.cache.rewind(agreed)
        except PositionError as error:
            again = converse(named, prefixes=talk.prefixes, max_context=talk.cache.max_context)
            with contextlib.suppress(PackError):
                again.begin(ids)
            notes.print(f"{again.origin.tokens:,} of {len(ids):,} tokens reused: {error}")
            talk.cache.close()
            talk = again
    talk.read(ids)
    return talk
