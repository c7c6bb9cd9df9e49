"""Code that runs in a process of its own, under limits that would hurt the tests' own process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PRELUDE = """
import ctypes, gc, mmap, os, resource, sys
import torch
import tiny
from kvplane import KVStore
from kvplane.errors import MemoryUnavailable
from kvplane.memory import address

def refused(call):
    try:
        call()
    except MemoryUnavailable as error:
        return str(error)
    raise SystemExit("nothing was refused")

def check(condition, what):
    if not condition:
        raise SystemExit(what)

def lower(limit, value):
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
"""


def run(code, *before):
    """What the code printed, once it has ended well; `before` is a command that starts it."""
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        # where mappings run out, the test's own tensors are not to need any
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(1 << 27),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    }
    done = subprocess.run(
        [*before, sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )

    if done.returncode or done.stderr:
        # a signal is a negative number
        raise AssertionError(f"ended with {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout
