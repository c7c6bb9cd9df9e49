"""Whether a prompt goes on from what a session holds."""

from collections.abc import Sequence

from torch import Tensor

from kvplane.errors import PositionError
from kvplane.session import Session


def checked(session: Session | None, ids: Tensor) -> int:
    """The length of a prompt that begins with all the tokens a session holds.

    Args:
        session: None, or one that may or may not know its token ids.
        ids: the whole prompt, `[batch, tokens]`; a batch that transformers is about to repeat for
            beams may be smaller than the session's.

    Raises:
        PositionError: it is shorter, or another text. Nothing was changed.
    """
    length = int(ids.shape[1])
    if session is None:
        return length
    held = session.position - session.first_position
    if length < held:
        message = (
            f"the prompt has {length} tokens, the cache already holds {held}: rewind it to the "
            f"{length - 1} they share, or use a fork; nothing was changed"
        )
        raise PositionError(message, position=length)
    known = session.tokens
    if known is None:
        return length
    rows: Sequence[Sequence[int]] = known if session.batch is not None else [known]  # type: ignore[assignment, list-item] # lists of ids when there is a batch
    given = ids[:, :held].tolist()
    repeats, rest = divmod(len(rows), len(given))
    if rest:
        message = f"the prompt has {len(given)} sequences, the cache {len(rows)}"
        raise PositionError(message, position=0)
    for number, row in enumerate(rows):
        prompt = given[number // repeats]
        if prompt != row:
            place = common(prompt, row)
            message = (
                f"the prompt is another text than the cache holds: token {prompt[place]} instead "
                f"of {row[place]} at position {place} of sequence {number}. Pass the whole "
                f"conversation, or rewind({place}) to keep what they share; nothing was changed"
            )
            raise PositionError(message, position=place)
    return length


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
