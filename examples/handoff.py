"""One process reads a prompt, another goes on with it: the same bits, and only the rows it needs.

Of a sliding layer that is the window, whatever the prompt's length.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from kvplane import KVStore, ModelGeometry
from kvplane.transfer import Listener, connect, receive, send

PROMPT, MORE = 1500, 50
kinds = ["sliding_attention"] * 3 + ["full_attention"]
shape = ModelGeometry.uniform(kinds, sliding_window=128, num_kv_heads=2, head_dim=16)
rows = torch.randn(
    3, 4, PROMPT + MORE, 2, 16, generator=torch.Generator().manual_seed(15)
).bfloat16()


def read(session, stop, num_tokens):
    """Tokens up to `stop`; what attention says in every layer."""
    said = []
    while session.position < stop:
        with session.step(min(num_tokens, stop - session.position)) as step:
            part = rows[:, :, step.first : step.stop]
            said += [step.attend(layer, *part[:, layer]) for layer in range(4)]
    return torch.cat(said)


store = KVStore(shape, max_context=4096)
if sys.argv[1:]:
    prompt = store.open()
    read(prompt, PROMPT, 256)
    with connect(sys.argv[1]) as link:
        send(prompt, link)
        link.finish()
    raise SystemExit
with tempfile.TemporaryDirectory() as folder, Listener(f"unix:{folder}/link") as listener:
    command = [sys.executable, str(Path(__file__)), f"unix:{folder}/link"]
    with subprocess.Popen(command) as other, listener.accept() as link:
        received = receive(store, link)
print(f"received {received.tokens:,} tokens in {received.nbytes:,} bytes of rows")
whole = PROMPT * 4 * 2 * 2 * 16 * 2
print(f"every row of every layer would be {whole:,}; the sender's exit code was {other.returncode}")

alone = store.open()
read(alone, PROMPT, 256)
same = torch.equal(read(received.session, PROMPT + MORE, 1), read(alone, PROMPT + MORE, 1))
print("what follows is the same, bit for bit:", same)
raise SystemExit(not same or not received.same_numerics)
