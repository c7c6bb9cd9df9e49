"""Make glimmer-nano, the small trained model inside the wheel, from nothing.

    python tools/train_nano.py prepare  --corpus corpus
    python tools/train_nano.py train    --corpus corpus --out build/nano --minutes 8
    python tools/train_nano.py evaluate --corpus corpus --model build/nano
    python tools/train_nano.py plot     --model build/nano --image docs/images/nano-loss.png

`prepare` needs Debian's apt-get and dpkg and a network; the rest needs neither.
"""

import argparse
import dataclasses
from pathlib import Path


def main() -> None:
    """Run one subcommand."""
    arguments = _parser().parse_args()
    arguments.run(arguments)


def _prepare(arguments: argparse.Namespace) -> None:
    from nano_corpus import prepare  # noqa: PLC0415

    prepare(arguments.corpus, packages=arguments.packages)


def _train(arguments: argparse.Namespace) -> None:
    from nano_training import Recipe, train  # noqa: PLC0415

    given = vars(arguments)
    names = {field.name for field in dataclasses.fields(Recipe)}
    recipe = Recipe(**{name: given[name] for name in names & set(given)})
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(recipe, arguments.corpus, arguments.out)


def _evaluate(arguments: argparse.Namespace) -> None:
    from nano_scores import evaluate  # noqa: PLC0415

    evaluate(
        arguments.model, arguments.corpus, device=arguments.device, documents=arguments.documents
    )


def _plot(arguments: argparse.Namespace) -> None:
    from nano_plot import plot  # noqa: PLC0415

    plot(arguments.model, arguments.image)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    prepare = commands.add_parser("prepare", help="write the corpus and its manifest")
    prepare.add_argument("--packages", type=Path, help="folder with the .deb files; none fetches")
    prepare.set_defaults(run=_prepare)

    train = commands.add_parser("train", help="train and save the weights as f16")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--size", choices=("nano", "tiny"), default="nano")
    train.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    whole = ("steps", "seed", "batch", "window", "long_window", "long_every", "validate_every")
    for name in (*whole, "warmup_steps"):
        train.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS)
    for name in ("minutes", "learning_rate", "dropout", "weight_decay"):
        train.add_argument(f"--{name.replace('_', '-')}", type=float, default=argparse.SUPPRESS)
    train.add_argument("--no-compile", dest="compiled", action="store_false")
    train.add_argument("--no-blocks", dest="blocked", action="store_false")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="score held-out files and write samples")
    evaluate.add_argument("--model", type=Path, required=True)
    evaluate.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    evaluate.add_argument("--documents", type=int, help="only the first few held-out files")
    evaluate.set_defaults(run=_evaluate)

    for command in (prepare, train, evaluate):
        command.add_argument("--corpus", type=Path, default=Path("corpus"))

    plot = commands.add_parser("plot", help="draw the loss curve")
    plot.add_argument("--model", type=Path, required=True)
    plot.add_argument("--image", type=Path, required=True)
    plot.set_defaults(run=_plot)
    return parser


if __name__ == "__main__":
    main()
