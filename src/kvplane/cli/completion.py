"""`kvplane completion`: what a shell needs to complete commands and options."""

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a completion script for a shell.

    Example: kvplane completion bash > ~/.local/share/bash-completion/completions/kvplane

    Args:
        shell: bash, zsh or fish.
    """
    from kvplane.cli import make_app  # noqa: PLC0415 - the door imports commands, not they it

    print(make_app().generate_completion(shell=shell))  # noqa: T201
