"""The agent that resends its history: each turn reuses what was read, and says so."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "agent_turns.py"
LINE = re.compile(r"turn \d: +([0-9,]+) of +([0-9,]+) tokens reused; nothing .* beyond (\d+)")


def test_every_turn_of_an_agent_reuses_all_but_what_is_new_or_edited():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True)
    *turns, verdict = done.stdout.splitlines()
    counts = [
        [int(count.replace(",", "")) for count in LINE.fullmatch(turn).groups()] for turn in turns
    ]
    read = [length - reused for reused, length, _ in counts]

    assert verdict.endswith("True")
    # the rules and a question; then questions; after the edit also two turns that followed it
    assert [1033, *[133] * 5, 475, *[133] * 3] == read
    assert [reused for reused, _, _ in counts] == [beyond for _, _, beyond in counts]
    assert len(EXAMPLE.read_text().splitlines()) < 60
