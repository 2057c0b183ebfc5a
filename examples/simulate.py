"""Simulate a federation, read its report, use its classifier and its synthetic images.

python examples/simulate.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from fedgist import evaluate, execute, load, load_classifier, open_source

SETTINGS = [
    "data.source=fashion-mini@1/6",
    "data.clients=3",
    "data.partition=dirichlet:0.5",
    "privacy.epsilon=10",
    "method.heads=['lda', 'decode']",
    "method.synthetic_size=200",  # small numbers, for a run of seconds
    "method.recipe.steps=30",
    "evaluation.curve=false",
]


def main(folder: Path) -> None:
    """Run into ``folder``, then go on with nothing but what lies there."""
    report = execute(load(None, SETTINGS), folder).report
    print(report["claim"]["line"])
    for name, head in report["heads"].items():
        print(f"{name}: {head['accuracy']:.3f}, without privacy {head['ceiling']:.3f}")

    classifier = load_classifier(folder / "classifier.safetensors")
    source = open_source("fashion-mini")
    score = evaluate(classifier, source.images("test", source.task()))
    print(f"loaded again: {score.accuracy:.3f} on {score.n} images, ECE {score.ece:.3f}")

    shared = open_source(folder / "synthetic")
    images = shared.images("train", shared.task())
    print(f"{len(images)} synthetic images of {len(images.classes)} classes in {folder}/synthetic")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name, "run"))
