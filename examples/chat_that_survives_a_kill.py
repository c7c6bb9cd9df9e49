"""A chat whose process is killed (SIGKILL) in the middle of a turn, and goes on as if it were not.

After each turn the session is saved, of which only what is new is written. The turn that was cut
off is said again; every other one is resumed, not read again.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import logging

from kvplane.integrations.transformers import HybridCache
from kvplane.models import BOS, decode, encode, load_nano

TURNS = ["What does json.dumps() return?\n\n", "\n\nAnd json.load()?\n\n", "\n\nSo, in short,"]
logging.set_verbosity_error()


def chat(root):
    """Every turn that was not said yet; all that was read and said."""
    model = load_nano()
    if (root / "sessions" / "chat.json").exists():
        cache = HybridCache.load(root, model, name="chat", slack=1)
        held = cache.tokens
        print(f"resumed: {cache.origin.tokens} tokens need not be read again", flush=True)
    else:
        cache, held = HybridCache(model, slack=1), [BOS]
    for turn in [turn for turn in TURNS if turn not in decode(held)]:
        print(f"turn: {turn.strip()}", flush=True)
        ids = torch.tensor([[*held, *encode(turn)]])
        answer = model.generate(ids, cache=cache, max_new_tokens=24, do_sample=False)
        cache.save(root, tokens=answer, name="chat")
        held = cache.tokens
    return decode(held)


def killed_in_turn(root, number):
    """Another process has the chat, and is killed in a turn."""
    command = [sys.executable, "-u", __file__, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        for line in other.stdout:
            if line.strip() == f"turn: {TURNS[number].strip()}":
                other.kill()
    return other.returncode


if sys.argv[1:]:
    chat(Path(sys.argv[1]))
    raise SystemExit
with tempfile.TemporaryDirectory() as folder:
    undisturbed = chat(Path(folder, "undisturbed"))
    print("a process was killed, exit code", killed_in_turn(Path(folder, "killed"), 1))
    same = chat(Path(folder, "killed")) == undisturbed
print("the same text, byte for byte:", same)
raise SystemExit(not same)
