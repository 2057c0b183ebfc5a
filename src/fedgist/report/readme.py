"""README files of what a run leaves: cards for data sets and models, as Hugging Face reads them.

A card is made of the report record; what only the publisher knows (`Terms`) is left out until
given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FILES", "Terms", "dataset_card", "may_pass_on", "model_card"]

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"))
# What YAML must not see as it is: JSON leaves it in strings
UNSEEN = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


@dataclass(frozen=True)
class Terms:
    """What only the one who publishes knows; empty where not decided.

    Attributes:
        licence: a name that Hugging Face knows, such as ``cc-by-4.0``.
        creator: a person or an organisation.
        url: the page of the data set.
        published: date of publication, ISO 8601.
    """

    licence: str = ""
    creator: str = ""
    url: str = ""
    published: str = ""


def may_pass_on(claim: Mapping[str, Any]) -> str:
    """Say who may get the synthetic set and the classifier, as far as the claim decides it."""
    if claim["epsilon"] == float("inf"):
        return "Keep synthetic set and classifier where the original images may be kept."
    if claim["seeded"]:
        return "From a simulation: synthetic set and classifier must not pass for protected."
    return "The bound holds for the synthetic set and the classifier, both together."


def _warning(claim: Mapping[str, Any]) -> str:
    """Return what must be read before anything else, or an empty text."""
    if claim["epsilon"] == float("inf"):
        return "**No privacy guarantee holds. Handle this like the original images.**\n\n"
    if claim["seeded"]:
        return (
            "**Made in a simulation: the noise came from a seed and can be taken off again. "
            "Not fit for release.**\n\n"
        )
    return ""


_CLASSES = """- `classes.json`: number and name of every class, and the folder where there are any.
- `metadata.json`: the privacy claim in full.
"""
FILES = {
    "imagefolder": """- `train/<class>/*.png`: one folder a class. A loader that numbers classes by
  sorted folder names may number them differently from the task; `classes.json` has the task's
  numbers. A class without images keeps its empty folder.
- `synthetic.npz`: the same images in the same order. `numpy.load("synthetic.npz")` gives
  `images` (uint8), `labels` (int64) and `classes`.
- `croissant.json`: the same description for programs.
""",
    "parquet": """- `data/train-*.parquet`: columns `image` (PNG) and `label`, with the class
  names in the schema. `datasets.load_dataset(FOLDER)` reads them.
""",
    "webdataset": """- `train-*.tar`: WebDataset shards; `KEY.png` is an image, `KEY.cls` its
  label.
""",
    "medmnist": """- `medmnist.npz`: `train_images` (uint8), `train_labels` ([n, 1]) as in
  MedMNIST, and `classes`. It has no validation or test arrays.
""",
    "dpimagebench": """- `gen.npz`: what DPImageBench evaluates: `x` float32 [n, channels, h, w] in
  [0, 1], `y` int64 [n]. Its evaluator counts the classes that are present: every class needs an
  image.
""",
}


def dataset_card(
    record: Mapping[str, Any], images: int, layout: str = "imagefolder", terms: Terms | None = None
) -> str:
    """Return the README of a synthetic set, a Hugging Face data set card.

    Args:
        record: ``title``, ``claim`` and ``task`` of the report.
        images: how many there are.
        layout: how they are stored, a key of `FILES`.
        terms: of publication.
    """
    claim, task = record["claim"], record["task"]
    made = f"by FedGist: {record['title']}" if record["title"] else "by FedGist"
    paths = {
        "imagefolder": "train/**/*.png",
        "parquet": "data/train-*.parquet",
        "webdataset": "train-*.tar",
    }
    files = [{"split": "train", "path": paths[layout]}] if layout in paths else []
    head: dict[str, Any] = {
        "pretty_name": f"Synthetic images: {record['title'] or task['name']}",
        "task_categories": ["image-classification"],
        "size_categories": [next((name for most, name in SIZES if images < most), "1M<n<10M")],
        "source_datasets": [],
        "tags": ["synthetic", "differential-privacy", "federated-learning", "fedgist"],
    }
    if files:
        head["configs"] = [{"config_name": "default", "data_files": files}]
    return f"""{_yaml(head, terms)}
# Synthetic images, not real ones

{images:,} images that no camera took, made {made}.
They are meant for training classifiers; do not take any of them for a record of a person or thing.

## Privacy

{claim["line"]}.

{_warning(claim)}In words: {claim["odds"]}.

## Uses

Direct use: train an image classifier on them, for the classes {_listed(task["classes"])}.

Out of scope: diagnosis or any decision from a single synthetic image, studies that count or measure
them as if they had been observed, and tests of a classifier. There is no test split: measure on
real images.

## Limits

What is rare in the original images may be missing, and what they have in common, biases and the
marks of a device included, is carried over. Labels are those that the images were made for; nobody
has looked at them.

## Files

{FILES[layout]}{_CLASSES}"""


def model_card(
    record: Mapping[str, Any], kind: str, head: str, files: str, terms: Terms | None = None
) -> str:
    """Return the README of a classifier, a Hugging Face model card.

    Args:
        record: the report.
        kind: of the classifier, such as ``network``.
        head: its name in the report.
        files: a Markdown list of what lies beside it.
        terms: of publication.
    """
    claim, task = record["claim"], record["task"]
    front = {
        "library_name": "fedgist",
        "pipeline_tag": "image-classification",
        "tags": ["differential-privacy", "federated-learning", "fedgist"],
    }
    colour = "grey" if task["channels"] == 1 else "RGB"
    return f"""{_yaml(front, terms)}
# Image classifier: {_line(record["title"])}

Kind `{kind}`, head `{head}`. It takes {colour} images of {task["size"]} x {task["size"]} pixels,
float32 `[batch, {task["channels"]}, {task["size"]}, {task["size"]}]` in [0, 1], and gives the
logarithms of the probabilities of {len(task["classes"])} classes:
{_listed(task["classes"])}.

## Privacy

{claim["line"]}.

{_warning(claim)}In words: {claim["odds"]}.

## Uses

Direct use: classify images of the same kind as those that it was learned from.

Out of scope: images of another kind or device, classes that are not in the list, and decisions on
people that nobody checks. Measure it on real images of your own first.

## Limits

What the original images have in common, biases and the marks of a device included, is carried over.

## Files

{files}"""


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{_line(n).replace('`', chr(39))}`" for n in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _line(text: str) -> str:
    return " ".join(text.encode("utf-8", "replace").decode().split())


def _yaml(head: Mapping[str, Any], terms: Terms | None) -> str:
    """Return the metadata block: one key a line, values as JSON, which YAML contains."""
    if terms is not None and terms.licence:
        head = {"license": terms.licence} | dict(head)
    rows = []
    for key, value in head.items():
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
        text = UNSEEN.sub(lambda m: f"\\u{ord(m.group()):04x}", text)
        rows.append(f"{key}: {text}")
    return "\n".join(["---", *rows, "---", ""])
