"""`kvplane run`: read a prompt, say what follows, keep the session."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kvplane.cli.asking import Asking
from kvplane.cli.links import identity_of
from kvplane.cli.memory import check_memory
from kvplane.cli.output import human
from kvplane.errors import ArgumentError, ContextFull, PositionError
from kvplane.home import home

if TYPE_CHECKING:
    from kvplane.integrations.transformers.conversation import Conversation
    from kvplane.storage import Storage

SHOWN_PROGRESS = 2048


class Place(NamedTuple):
    """Where a session is kept; its name is locked.

    Args:
        storage: a root.
        session: name.
    """

    storage: "Storage"
    session: str

    @property
    def is_saved(self) -> bool:
        """Whether there is one of that name."""
        from kvplane.pack import session_names  # noqa: PLC0415

        return self.session in session_names(self.storage)


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
    prefill_from: str | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    stats: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Read a prompt and say what follows; with --session, go on where it stopped.

    Example: kvplane run --session notes --file long.txt "In summary,"

    Args:
        prompt: Text to go on from; after the file's, when both are given.
        session: Name of a session: made, or resumed with everything it has read. The prompt is
            added to it, unless the prompt begins with all of it.
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
        prefill_from: host:port, or unix: and a path, of a `kvplane prefill` that reads a new
            session's prompt but for its last token; nothing is reused then.
        certificate: PEM file, for TLS with it.
        key: PEM file of its private key.
        authority: PEM file of whom its certificate must be from.
        insecure: Send the prompt to another machine in plain bytes.
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
    check_memory(config, dtype=dtype, device=device, max_context=max_context)
    place = None
    with contextlib.ExitStack() as held:
        if session is not None:
            place = Place(open_root(home(), create=True), check_session_name(session))
            held.enter_context(place.storage.lock(session))
        named = loading.load_model(model, dtype=dtype, device=device)
        prefixes = None if prompt_cache is None else PrefixCache(prompt_cache, named.fingerprint)
        talk = converse(named, prefixes=prefixes, max_context=max_context)
        ask = None
        if prefill_from is not None:
            identity = identity_of(certificate, key, authority)
            ask = Asking(prefill_from, identity, insecure=insecure)
        _read(talk, place, text, strict=strict, ask=ask)
        _say(
            talk,
            place,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stats=stats,
        )


def _notes() -> Console:
    """Standard error; names and reasons are printed as they are, lines are not wrapped."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def _text(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(argument="file", expected="a readable text", got=str(error)) from error


def _read(
    talk: "Conversation",
    place: "Place | None",
    text: str,
    *,
    strict: bool,
    ask: "Asking | None",
) -> None:
    notes = _notes()
    words = talk.named.words
    ids = [*words.begin, *words.encode(text)]
    whole = ids
    if place is not None and place.is_saved:
        ids = _gone_on(talk, place, ids, notes)
    elif ask is not None and len(ids) > 1:
        ask.fill(talk, ids, notes)
    else:
        talk.begin(ids, strict=strict)
    if not ids:
        raise ArgumentError(argument="prompt", expected="at least one token", got=text)
    origin = talk.origin
    if origin.tokens or origin.reason:
        line = (
            f"{origin.tokens:,} of {len(ids):,} tokens from {origin.source}, {origin.seconds:.2f} s"
        )
        notes.print(line + (f" ({origin.reason})" if origin.reason else ""))
    begin = talk.cache.seen
    try:
        with _progress(notes, len(ids) - begin) as advance:
            talk.read(ids, progress=lambda position: advance(position - begin))
    except PositionError as error:
        if begin < len(ids):
            raise
        # its last token would have to run again
        raise ArgumentError(argument="prompt", expected="a token more", got=str(error)) from error
    except KeyboardInterrupt:
        # part of an addition would be added again by the next command: then nothing was said yet
        kept = _kept(talk, place if ids == whole else None)
        if kept is not None:
            notes.print(
                f"stopped after {talk.cache.seen:,} of {len(ids):,} tokens, {kept}; "
                "the same command goes on there"
            )
        raise


def _gone_on(
    talk: "Conversation",
    place: "Place",
    ids: list[int],
    notes: Console,
) -> list[int]:
    """The ids to read after a session was resumed: a prompt is added, or says it all again."""
    from kvplane.schedule import CHUNK  # noqa: PLC0415

    words = talk.named.words
    talk.resume(place.storage, place.session)
    if talk.saved_words not in {None, words.name}:
        notes.print(f"session {place.session} was written with the tokenizer {talk.saved_words}")
    held = talk.ids
    if CHUNK <= len(held) <= len(ids) and ids[: len(held)] == held:
        # as after Ctrl-C while reading, or from who sends the whole conversation every time
        notes.print(
            f"the prompt begins with all that session {place.session} holds: it goes on there"
        )
        return ids
    return held + ids[len(words.begin) :]


def _kept(talk: "Conversation", place: "Place | None") -> str | None:
    """Save what was committed until here, and take a cut; says what was saved, if anything."""
    if not talk.cache.seen:
        return None
    talk.publish()
    if place is None:
        return None
    written = talk.save(place.storage, place.session)
    return f"saved session {place.session}: {human(written.nbytes_written)} new"


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
    place: "Place | None",
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stats: bool,
) -> None:
    import torch  # noqa: PLC0415

    notes = _notes()
    begin, read = time.perf_counter(), talk.cache.seen
    heard: list[int] = []
    ended: BaseException | None = None
    said = talk.say(
        max_new_tokens,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )
    try:
        _print(talk, _noted(said, heard))
    except (KeyboardInterrupt, ContextFull) as error:
        # what was committed until here is whole: say and save it
        ended = error
        _print(talk, talk.ids[read + len(heard) :])
    seconds = time.perf_counter() - begin
    sys.stdout.write("\n")
    sys.stdout.flush()
    kept = _kept(talk, place)
    if stats:
        notes.print(kept or "nothing saved: no --session")
        notes.print(_stats(talk, talk.cache.seen - read, seconds))
    if isinstance(ended, ContextFull):
        intact = "" if place is None else f" session {place.session} is saved;"
        notes.print(
            f"max_context {talk.cache.max_context} is reached;{intact} "
            "a new session, or a larger --max-context, goes on"
        )
    elif ended is not None:
        raise ended


def _print(talk: "Conversation", ids: Iterable[int]) -> None:
    for piece in talk.named.words.pieces(ids):
        sys.stdout.write(piece)
        sys.stdout.flush()


def _noted(ids: Iterable[int], heard: list[int]) -> Iterator[int]:
    for token in ids:
        heard.append(token)
        yield token


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
