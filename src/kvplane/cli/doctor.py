"""`kvplane doctor`: what is installed, which backends are used and why, and a short self-test."""

import json
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from kvplane._version import __version__
from kvplane.cli.memory import available_nbytes
from kvplane.cli.output import console, human, print_table
from kvplane.home import home

FAILED = 1
REQUIRED = ("torch", "transformers", "safetensors", "blake3", "numpy", "cyclopts", "rich")
# distribution, what it is for, the extra that brings it
OPTIONAL = (
    ("triton", "attention and stores on a GPU", "gpu"),
    ("cuda-bindings", "memory of a GPU, page by page", "gpu"),
    ("obstore", "roots in object stores", "s3"),
    ("cryptography", "signed interchange files", "kvpack"),
    ("zstandard", "compressed interchange files", "zstd"),
    ("matplotlib", "plots of footprints and benches", "plot"),
)
LIMITS = {
    "memory maps of a process": Path("/proc/sys/vm/max_map_count"),
    "open files of the system": Path("/proc/sys/fs/file-max"),
}


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Say what is installed, which backends will be used and why, and test them for two seconds.

    Exits with 1 when a part of the self-test fails.

    Example: kvplane doctor

    Args:
        as_json: Print JSON.
    """
    from kvplane.cli.selftest import selftest  # noqa: PLC0415 - torch, seconds

    facts: dict[str, Any] = {
        "kvplane": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in REQUIRED},
        "extras": {name: _version(name) for name, _, _ in OPTIONAL},
        "devices": _devices(),
        "limits": {name: _number(path) for name, path in LIMITS.items()},
        "home": _home(),
        "selftest": [part._asdict() for part in selftest()],
    }
    if as_json:
        print(json.dumps(facts))  # noqa: T201
    else:
        _print(facts)
    if not all(part["good"] for part in facts["selftest"]):
        raise SystemExit(FAILED)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _devices() -> dict[str, Any]:
    """What a store does on each device, and the memory that is free there."""
    import torch  # noqa: PLC0415 - seconds

    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    return {name: _device(name) for name in names}


def _device(name: str) -> dict[str, Any]:
    from kvplane.cli.selftest import small_store  # noqa: PLC0415 - torch, seconds
    from kvplane.errors import KVPlaneError  # noqa: PLC0415

    facts: dict[str, Any] = {"free_nbytes": available_nbytes(name)}
    try:
        described = small_store(name).describe()
    except KVPlaneError as error:
        return facts | {"error": str(error)}
    return facts | {
        "memory": described.memory["backend"],
        "why": described.memory["why"],
        "page_nbytes": described.memory["page_nbytes"],
        "fork": described.memory["fork"],
        "attention": described.attention,
        "kernel": described.numerics["kernel"],
        "processor": described.numerics["processor"],
    }


def _home() -> dict[str, Any]:
    folder = home()
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    return {
        "path": str(folder),
        "exists": folder.exists(),
        "writable": os.access(there, os.W_OK),
        "free_nbytes": shutil.disk_usage(there).free,
    }


def _print(facts: dict[str, Any]) -> None:
    out = console()
    out.print(f"kvplane {facts['kvplane']}, Python {facts['python']}, {facts['system']}")
    out.print()
    rows = [[name, version or "missing: needed"] for name, version in facts["packages"].items()]
    for name, purpose, extra in OPTIONAL:
        version = facts["extras"][name]
        how = f"not installed: pip install 'kvplane[{extra}]'" if version is None else version
        # square brackets mean markup to rich
        rows.append([f"{name} ({purpose})", how.replace("[", r"\[")])
    print_table(out, "packages", ["", "version"], rows)
    for name, device in facts["devices"].items():
        free = device["free_nbytes"]
        room = "" if free is None else f", {human(free)} free"
        if "error" in device:
            out.print(f"{name}{room}: {device['error']}", soft_wrap=True)
            continue
        out.print(f"{name}: {device['processor']}{room}", soft_wrap=True)
        out.print(f"  memory: {device['memory']} ({device['why']}), fork {device['fork']}")
        out.print(f"  attention: {device['attention']}, by {device['kernel']}")
    for name, number in facts["limits"].items():
        if number is not None:
            out.print(f"{name}: at most {number:,}")
    place = facts["home"]
    state = "writable" if place["writable"] else "NOT WRITABLE"
    free = human(place["free_nbytes"])
    out.print(f"sessions are kept in {place['path']}: {state}, {free} free", soft_wrap=True)
    out.print()
    for part in facts["selftest"]:
        mark = "[green]ok[/]    " if part["good"] else "[red]FAILED[/]"
        out.print(f"{mark} {part['what']} ({part['seconds']:.2f} s) {part['note']}".rstrip())
