"""Croissant 1.1 metadata of a synthetic set, with fields for responsible AI (RAI 1.0).

Specifications: http://mlcommons.org/croissant/1.1 and http://mlcommons.org/croissant/RAI/1.0. The
set is described as it lies in its folder: an ImageFolder, the npz, the list of classes. Licence,
creator, page and date of publication are required there, and known to the publisher only
(`readme.Terms`): they are left out until given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedgist.report.readme import Terms, may_pass_on

__all__ = ["croissant"]

TERMS = (
    "arrayShape",
    "citeAs",
    "column",
    "containedIn",
    "equivalentProperty",
    "examples",
    "extract",
    "field",
    "fileObject",
    "fileProperty",
    "fileSet",
    "format",
    "includes",
    "isArray",
    "isLiveDataset",
    "jsonPath",
    "key",
    "md5",
    "parentField",
    "path",
    "recordSet",
    "references",
    "regex",
    "repeated",
    "replace",
    "samplingRate",
    "separator",
    "source",
    "subField",
    "transform",
)
NPZ = "https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html"


def croissant(
    record: Mapping[str, Any], folder: Path, images: int, terms: Terms | None = None
) -> dict[str, Any]:
    """Return the metadata of the set in ``folder``, as plain JSON values.

    Args:
        record: ``title``, ``claim``, ``task`` of the report, and ``created`` if it is known.
        folder: with ``synthetic.npz`` and ``classes.json``, whose hashes are taken.
        images: how many there are.
        terms: of publication.
    """
    claim, task = record["claim"], record["task"]
    title = record["title"] or task["name"]
    return {
        "@context": _context(),
        "@type": "sc:Dataset",
        "name": f"synthetic-{re.sub(r'[^a-zA-Z0-9]+', '-', title).strip('-').lower() or 'images'}",
        "description": f"{images} synthetic images made by FedGist ({title}), of "
        f"{len(task['classes'])} classes. No camera took them. {claim['line']}.",
        "conformsTo": [
            "http://mlcommons.org/croissant/1.1",
            "http://mlcommons.org/croissant/RAI/1.0",
        ],
        "keywords": ["synthetic", "differential privacy", "federated learning"],
        **_published(record, terms or Terms()),
        **_responsible(record),
        "distribution": _files(folder),
        "recordSet": [_classes(), _images()],
    }


def _context() -> dict[str, Any]:
    special: dict[str, Any] = {
        "@language": "en",
        "@vocab": "https://schema.org/",
        "sc": "https://schema.org/",
        "cr": "http://mlcommons.org/croissant/",
        "rai": "http://mlcommons.org/croissant/RAI/",
        "dct": "http://purl.org/dc/terms/",
        "conformsTo": "dct:conformsTo",
        "data": {"@id": "cr:data", "@type": "@json"},
        "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
        "examples": {"@id": "cr:examples", "@type": "@json"},
        "name": {"@container": "@language"},
        "description": {"@container": "@language"},
    }
    return {name: f"cr:{name}" for name in TERMS} | special


def _published(record: Mapping[str, Any], terms: Terms) -> dict[str, Any]:
    licence = terms.licence
    if licence and "://" not in licence:
        licence = f"https://spdx.org/licenses/{licence}"
    found = {
        "dateCreated": record.get("created"),
        "license": licence,
        "creator": {"@type": "sc:Organization", "name": terms.creator} if terms.creator else None,
        "url": terms.url,
        "datePublished": terms.published,
    }
    return {k: v for k, v in found.items() if v}


def _responsible(record: Mapping[str, Any]) -> dict[str, Any]:
    claim = record["claim"]
    return {
        "rai:dataCollection": "Nothing was collected: the images were computed from what clients "
        f"of a federation sent, by this mechanism: {claim['mechanism']}.",
        "rai:dataManipulationProtocol": f"Noise by {claim['noise_by']}; sampling: "
        f"{claim['sampling']}; public sources: {claim['track']}.",
        "rai:dataAnnotationProtocol": [
            "A label is the class that an image was made for; nobody has looked at it."
        ],
        "rai:personalSensitiveInformation": [f"{claim['line']}. In words: {claim['odds']}."],
        "rai:dataBiases": [
            "What the original images have in common, biases and the marks of a device included, "
            "is carried over."
        ],
        "rai:dataLimitations": [
            "Rare things may be missing. There is no test split: measure on real images."
        ],
        "rai:dataUseCases": [
            "Training image classifiers. Not for decisions from single images, for studies that "
            "count or measure them as if they had been observed, or for tests of a classifier."
        ],
        "rai:dataSocialImpact": may_pass_on(claim),
        "rai:dataReleaseMaintenancePlan": "This set does not change. A further release from the "
        "same images adds to ε.",
    }


def _files(folder: Path) -> list[dict[str, Any]]:
    def file(name: str, form: str, text: str) -> dict[str, Any]:
        data = (folder / name).read_bytes()
        return {
            "@type": "cr:FileObject",
            "@id": name,
            "name": name,
            "description": text,
            "contentUrl": name,
            "contentSize": f"{len(data)} B",
            "encodingFormat": form,
            "sha256": sha256(data).hexdigest(),
        }

    return [
        file("classes.json", "application/json", "Number, name and folder of every class."),
        file("synthetic.npz", NPZ, "The same images in one file: images, labels, classes."),
        {
            "@type": "cr:FileSet",
            "@id": "png",
            "name": "png",
            "description": "One folder a class.",
            "encodingFormat": "image/png",
            "includes": "train/*/*.png",
        },
    ]


def _classes() -> dict[str, Any]:
    def field(name: str, kind: str) -> dict[str, Any]:
        extract = {"jsonPath": f"$.classes[*].{name}"}
        return _field("classes", name, kind, {"fileObject": {"@id": "classes.json"}}, extract)

    return {
        "@type": "cr:RecordSet",
        "@id": "classes",
        "name": "classes",
        "key": {"@id": "classes/folder"},
        "field": [
            field("index", "sc:Integer"),
            field("name", "sc:Text"),
            field("folder", "sc:Text"),
        ],
    }


def _images() -> dict[str, Any]:
    source = {"fileSet": {"@id": "png"}}
    folder = _field("images", "folder", "sc:Text", source, {"fileProperty": "fullpath"})
    folder["source"]["transform"] = {"regex": "(?:.*/)?([^/]+)/[0-9]+\\.png$"}
    folder["references"] = {"field": {"@id": "classes/folder"}}
    return {
        "@type": "cr:RecordSet",
        "@id": "images",
        "name": "images",
        "field": [
            _field("images", "image", "sc:ImageObject", source, {"fileProperty": "content"}),
            folder,
        ],
    }


def _field(
    records: str, name: str, kind: str, source: Mapping[str, Any], extract: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": f"{records}/{name}",
        "name": name,
        "dataType": kind,
        "source": dict(source) | {"extract": dict(extract)},
    }
