"""`kvplane run`: read a prompt, say what follows, keep the session."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kvplane.cli.output import human
from kvplane.errors import ArgumentError, ContextFull, MemoryUnavailable
from kvplane.home import home

if TYPE_CHECKING:
    from kvplane.integrations.transformers.conversation import Conversation
    from kvplane.integrations.transformers.loading import NamedModel
    from kvplane.storage import Storage

SHOWN_PROGRESS = 2048


def run(
    prompt: str | None = None,
    /,
    *,
    session: str | None = None,
    model: str = "glimmer-nano",
    file: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    max_context: int | None = None,
    prompt_cache: str | None = None,
    strict: bool = False,
    stats: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Read a prompt and say what follows; with --session, go on where it stopped.

    Example: kvplane run --session notes --file long.txt "In summary,"

    Args:
        prompt: Text to go on from; after the file's, when both are given.
        session: Name of a session: made, or resumed with everything it has read.
        model: glimmer-nano (shipped), a folder, or an id of any hybrid causal model.
        file: A text to read first.
        max_new_tokens: Tokens to say.
        temperature: 0 takes the likeliest.
        seed: Of the drawing, above temperature 0.
        dtype: float32, bfloat16 or float16; the model's own unless given.
        device: cpu, cuda, ...
        max_context: Positions end below it; the model's own unless given.
        prompt_cache: A root of prefixes: a prompt that begins like an earlier one reuses it.
        strict: Reuse only rows that a cold run would have bit for bit.
        stats: Print what was reused, wraps, bytes and rates to stderr.
    """
    from kvplane.integrations.transformers import loading  # noqa: PLC0415 - torch, seconds
    from kvplane.integrations.transformers.conversation import converse  # noqa: PLC0415
    from kvplane.pack import PrefixCache, check_session_name, open_root  # noqa: PLC0415

    if max_new_tokens < 0:
        raise ArgumentError(argument="max-new-tokens", expected="at least 0", got=max_new_tokens)
    if session is None and prompt is None and file is None:
        raise ArgumentError(argument="prompt", expected="a prompt, --file or --session", got=None)
    text = _text(file) + (prompt or "")
    config = loading.config_of(model)
    loading.check_hybrid(config, model)
    check_memory(config, dtype, max_context)
    storage = None
    with contextlib.ExitStack() as held:
        if session is not None:
            storage = open_root(home(), create=True)
            held.enter_context(storage.lock(check_session_name(session)))
        named = loading.load_model(model, dtype=dtype, device=device)
        prefixes = None if prompt_cache is None else PrefixCache(prompt_cache, named.fingerprint)
        talk = converse(named, prefixes=prefixes, max_context=max_context)
        _read(talk, named, storage, session, text, strict=strict)
        _say(
            talk,
            storage,
            session,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stats=stats,
        )


def _text(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(argument="file", expected="a readable text", got=str(error)) from error


def check_memory(config: Any, dtype: str | None, max_context: int | None) -> None:  # noqa: ANN401
    """Refuse, by the plan and before anything is loaded, what memory cannot hold.

    Raises:
        MemoryUnavailable: rings, full planes at max_context and scratch, against what is free.
    """
    from kvplane.footprint import footprint  # noqa: PLC0415
    from kvplane.geometry import ModelGeometry  # noqa: PLC0415
    from kvplane.integrations.transformers import kinds, options  # noqa: PLC0415

    text = kinds.text_config(config)
    geometry = ModelGeometry.from_config(text, dtype=dtype)
    context = options.context_of(text) if max_context is None else max_context
    plan = footprint(geometry, context=context, step=256)
    free = _available_nbytes()
    if free is not None and plan.session.reserved > free:
        raise MemoryUnavailable(
            f"a session of {context} tokens takes {human(plan.session.reserved)}, "
            f"{human(free)} are free: choose a smaller --max-context"
        )


def _available_nbytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _read(
    talk: "Conversation",
    named: "NamedModel",
    storage: "Storage | None",
    session: str | None,
    text: str,
    *,
    strict: bool,
) -> None:
    notes = Console(stderr=True, highlight=False)
    from kvplane.pack import session_names  # noqa: PLC0415

    resumed = storage is not None and session is not None and session in session_names(storage)
    if resumed and storage is not None and session is not None:
        talk.resume(storage, session)
        ids = talk.ids + named.words.encode(text)
        if talk.saved_words not in {None, named.words.name}:
            notes.print(f"session {session} was written with the tokenizer {talk.saved_words}")
    else:
        ids = [*named.words.begin, *named.words.encode(text)]
        talk.begin(ids, strict=strict)
    if not ids:
        raise ArgumentError(argument="prompt", expected="at least one token", got=text)
    if talk.reuse.tokens or talk.reuse.reason:
        reuse = talk.reuse
        line = f"{reuse.tokens:,} of {len(ids):,} tokens from {reuse.source}, {reuse.seconds:.2f} s"
        notes.print(line + (f" ({reuse.reason})" if reuse.reason else ""))
    with _progress(notes, len(ids) - talk.cache.seen) as advance:
        begin = talk.cache.seen
        talk.read(ids, progress=lambda position: advance(position - begin))


@contextlib.contextmanager
def _progress(notes: Console, num_tokens: int) -> Iterator[Any]:
    if num_tokens < SHOWN_PROGRESS or not notes.is_terminal:
        yield int
        return
    columns = TextColumn("reading"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("reading", total=num_tokens)
        yield lambda position: bar.update(task, completed=position)


def _say(
    talk: "Conversation",
    storage: "Storage | None",
    session: str | None,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stats: bool,
) -> None:
    import torch  # noqa: PLC0415

    notes = Console(stderr=True, highlight=False)
    begin, read = time.perf_counter(), talk.cache.seen
    ended: BaseException | None = None
    try:
        said = talk.say(
            max_new_tokens,
            temperature=temperature,
            generator=torch.Generator().manual_seed(seed),
        )
        for piece in talk.named.words.pieces(said):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except (KeyboardInterrupt, ContextFull) as error:
        # what was committed until here is whole: save it
        ended = error
    sys.stdout.write("\n")
    sys.stdout.flush()
    seconds = time.perf_counter() - begin
    if storage is not None and session is not None:
        written = talk.save(storage, session)
        if stats:
            notes.print(f"saved session {session}: {human(written.nbytes_written)} new")
    if stats:
        notes.print(_stats(talk, talk.cache.seen - read, seconds))
    if isinstance(ended, ContextFull):
        kept = f" session {session} is saved;" if session else ""
        notes.print(
            f"max_context {talk.cache.max_context} is reached;{kept} "
            "a new session, or a larger --max-context, goes on"
        )
    elif ended is not None:
        raise ended


def _stats(talk: "Conversation", said: int, seconds: float) -> str:
    session = talk.session
    held = session.store.memory().total
    wraps = max(
        (
            session.position // group.sliding_window
            for group in session.groups
            if group.sliding_window is not None
        ),
        default=0,
    )
    rate = said / seconds if seconds else 0.0
    return (
        f"{session.position:,} tokens, rings wrapped {wraps} times, "
        f"{human(held.rows_held)} of rows in {human(held.pages_held)} of pages, "
        f"{rate:.0f} tokens/s"
    )
