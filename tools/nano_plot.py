"""The loss curve of a training run, drawn from the JSON that the run wrote."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt


def plot(model_folder: Path, image: Path) -> None:
    """Draw `training.json` and the held-out figure of `evaluation.json` into `image`."""
    run = json.loads((model_folder / "training.json").read_text())
    heldout = json.loads((model_folder / "evaluation.json").read_text())["bits_per_byte"]
    mpl.use("agg")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    styles: dict[str, dict[str, Any]] = {
        "train": {"color": "0.65", "linewidth": 0.9, "label": "training batches"},
        "validation": {"color": "tab:blue", "marker": "o", "markersize": 3, "label": "validation"},
    }
    for part, style in styles.items():
        steps = [point["step"] for point in run[part]]
        axes.plot(steps, [point["bits_per_byte"] for point in run[part]], **style)
    axes.axvline(run["kept_step"], color="tab:blue", linewidth=0.8, linestyle=":")
    axes.axhline(
        heldout,
        color="tab:red",
        linewidth=1,
        linestyle="--",
        label=f"held-out files, {heldout:.3f}",
    )
    axes.set(xlabel="step (98,304 bytes each)", ylabel="bits per byte", ylim=(0.6, 2.4))
    axes.set_title(f"glimmer-nano: the weights of step {run['kept_step']:,} are kept", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    image.parent.mkdir(parents=True, exist_ok=True)
    # no version or date in the file: the same numbers give the same bytes
    figure.savefig(image, dpi=120, metadata={"Software": None})
