"""Going back: a rewind that loses nothing, one that is refused, and two ways to have it anyway."""

import torch

from kvplane import KVStore, ModelGeometry
from kvplane.errors import WindowLost

kinds = ["sliding_attention", "full_attention"]
shape = ModelGeometry.uniform(kinds, sliding_window=64, num_kv_heads=1, head_dim=16)
draw = torch.Generator().manual_seed(15)
rows = torch.randn(3, 2, 400, 1, 16, generator=draw).bfloat16()


def read(session, stop):
    """Tokens up to `stop`, one by one; what attention says of each in the full layer."""
    said = []
    while session.position < stop:
        with session.step(1) as step:
            for layer in range(2):
                out = step.attend(layer, *rows[:, layer, step.first : step.stop])
        said.append(out)
    return said


store = KVStore(shape, max_context=400)
session = store.open()
read(session, 60)
session.rewind(20)
print("rewound from 60 to 20: the ring of 64 has not wrapped yet")

wanted = read(session, 300)[-50:]
try:
    session.rewind(250)
except WindowLost as error:
    print(f"refused: {error}")
same = session.position == 300

# recording keeps what steps overwrite, at most a window of rows
recorded = store.open()
read(recorded, 200)
recorded.record()
read(recorded, 300)
recorded.rewind(250)
again = read(recorded, 300)
same &= all(map(torch.equal, wanted, again))
print("recorded: went back 50 tokens, and on with the same bits:", same)

# a checkpoint is a place to return to from anywhere
kept = store.open()
read(kept, 250)
checkpoint = kept.checkpoint()
read(kept, 400)
kept.return_to(checkpoint)
same &= all(map(torch.equal, wanted, read(kept, 300)))
print(f"checkpoint of {checkpoint.nbytes:,} bytes: went back 150 tokens, the same bits:", same)
raise SystemExit(not same)
