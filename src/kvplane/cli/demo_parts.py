"""The parts of the demo that run in a process of their own: `python -m kvplane.cli.demo_parts`.

Each reads its orders from a JSON file, does one thing, and writes the logits of its tokens as
safetensors, so that the demo can compare them bit for bit.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvplane.integrations.transformers.calls import call, chosen
from kvplane.integrations.transformers.conversation import Conversation, converse
from kvplane.integrations.transformers.loading import SHIPPED, NamedModel, load_model
from kvplane.pack import PrefixCache, open_root

SESSION = "demo"
NUM_NEW = 64


def undisturbed(talk: Conversation, num_tokens: int = NUM_NEW) -> tuple[list[int], Tensor]:
    """The next tokens and the logits that each was chosen from, `[num_tokens, vocabulary]`."""
    ids, rows = [], []
    logits = talk.logits
    for _ in range(num_tokens):
        if logits is None:
            break
        rows.append(logits)
        ids.append(chosen(logits))
        logits = call(talk.named.model, talk.cache, [ids[-1]])
        talk.cache.settle()
    talk.logits = logits
    return ids, torch.stack(rows)


def resume(orders: dict[str, Any], named: NamedModel) -> tuple[list[int], Tensor, dict[str, Any]]:
    """Go on from the saved session, in this process."""
    talk = converse(named)
    talk.resume(open_root(orders["root"]), SESSION)
    talk.read(talk.ids)
    ids, logits = undisturbed(talk)
    return ids, logits, {"reused": talk.origin.tokens, "load_s": talk.origin.seconds}


def reuse(orders: dict[str, Any], named: NamedModel) -> tuple[list[int], Tensor, dict[str, Any]]:
    """Read another prompt that begins like the first, from its cut, or cold."""
    prefixes = None if orders["cold"] else PrefixCache(orders["root"], named.fingerprint)
    talk = converse(named, prefixes=prefixes)
    begin = time.perf_counter()
    talk.begin(orders["ids"], strict=True)
    talk.prefixes = None
    talk.read(orders["ids"])
    seconds = time.perf_counter() - begin
    ids, logits = undisturbed(talk)
    facts = {
        "reused": talk.origin.tokens,
        "reason": talk.origin.reason,
        "first_token_s": seconds,
    }
    return ids, logits, facts


def ordered(folder: Path, name: str, orders: dict[str, Any]) -> list[str]:
    """The command that does a part; `result` reads what it wrote."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**orders, "out": str(folder / name)}), encoding="utf-8")
    return [sys.executable, "-m", "kvplane.cli.demo_parts", str(file)]


def result(folder: Path, name: str) -> tuple[list[int], Tensor, dict[str, Any]]:
    """What a part wrote: tokens, logits, facts."""
    facts = json.loads((folder / f"{name}.result.json").read_text(encoding="utf-8"))
    logits = load_file(folder / f"{name}.safetensors")["logits"]
    return facts.pop("ids"), logits, facts


def main() -> None:
    """Do what the file named on the command line says."""
    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    named = load_model(SHIPPED)
    part = {"resume": resume, "reuse": reuse}[orders["part"]]
    ids, logits, facts = part(orders, named)
    save_file({"logits": logits.contiguous()}, orders["out"] + ".safetensors")
    text = json.dumps({"ids": ids, **facts})
    Path(orders["out"] + ".result.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
