"""An agent that sends its whole history with every turn, and once edits a message in the middle.

Nothing is read again, on a model with sliding windows, but for what the edit changed.
"""

import tempfile

import torch
from transformers import logging

from kvplane.integrations.transformers import HybridCache
from kvplane.models import BOS, encode, heldout_text, load_nano

TURNS, EDITED, SAID = 10, 4, 40
logging.set_verbosity_error()
model = load_nano()
text = heldout_text()
rules, rest = text[:900], text[900:]
asked = ["\n\nQuestion: " + rest[first : first + 120] for first in range(0, 120 * TURNS, 120)]


def sent(history):
    """The ids of the rules, and of every question and answer so far."""
    ids = [BOS, *encode(rules)]
    for question, answer in history:
        ids += [*encode(question), *answer]
    return ids


with tempfile.TemporaryDirectory() as root:
    history, as_it_should, ended = [], True, 0
    for turn in range(TURNS):
        if turn == EDITED + 2:
            # the person changes what was asked two turns ago; later turns are sent as they were
            agreed = len(sent(history[:EDITED]))
            history[EDITED] = (asked[EDITED].replace("Question", "Please"), history[EDITED][1])
        prompt = sent([*history, (asked[turn], [])])
        cache = HybridCache.for_prompt(model, prompt, root)
        ids = torch.tensor([prompt])
        answer = model.generate(ids, cache=cache, max_new_tokens=SAID, do_sample=False)
        history.append((asked[turn], answer[0, len(prompt) :].tolist()))
        cache.publish()
        reused = cache.origin.tokens
        print(f"turn {turn}: {reused:5,} of {len(prompt):5,} tokens reused; {cache.origin.reason}")
        # all that was read until then, but after the edit only what came before it
        limit = agreed - 1 if turn == EDITED + 2 else ended
        as_it_should &= reused == limit
        ended = len(prompt) + SAID - 1
print("only what the edit changed was read again:", as_it_should)
raise SystemExit(not as_it_should)
