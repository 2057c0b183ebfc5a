"""What every reader gives: a `Source`, which turns a split into images under a task's policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from fedgist.data.images import Array, Encoded, convert, stack, warn_near_black
from fedgist.errors import ConfigError, DataError, did_you_mean
from fedgist.types import Images, Task

__all__ = ["SPLITS", "TEST_EVERY", "Records", "Source", "group_ids", "one_test_split"]

SPLITS = {  # names seen in the wild -> ours
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
ORDER = ("train", "val", "test")
TEST_EVERY = 5  # sets without a split: of each class, in order, every fifth is a test image

T = TypeVar("T")


@dataclass(frozen=True)
class Records:
    """One split as it lies on disk.

    Attributes:
        pixels: an array that `convert` takes, or encoded files.
        labels: integers ``[n]``, positions in the source's classes.
        groups: int64 ``[n]``, who each image belongs to, or None.
    """

    pixels: Array | Sequence[Encoded]
    labels: Array
    groups: Array | None = None


@dataclass(frozen=True)
class Source:
    """A labelled image set that can be read, split by split.

    Attributes:
        name: short name, used in messages and as the task's name.
        classes: class names in the source's own order.
        channels: 1 or 3, as stored; what `task` proposes.
        size: height and width in pixels, as stored; 64 when images have no common square size.
        splits: the splits that exist, a selection of ``train``, ``val``, ``test``. A set with a
            ``val`` and no ``test`` names it ``test``.
        licence: of the images; ``not stated`` when the source does not say.
        read: maps a split to its records.
    """

    name: str
    classes: tuple[str, ...]
    channels: Literal[1, 3]
    size: int
    splits: tuple[str, ...]
    licence: str
    read: Callable[[str], Records] = field(repr=False, compare=False)

    def task(self, **overrides: Any) -> Task:
        """Propose a task: this source's classes, channels and size, unless overridden.

        Raises:
            ConfigError: a name in ``overrides`` is not a field of `Task`.
        """
        known = [f.name for f in dataclasses.fields(Task)]
        for key in overrides:
            if key not in known:
                hint = did_you_mean(key, known)
                raise ConfigError(f"a task option must be one of {known}. Got '{key}'.{hint}")
        native: dict[str, Any] = {
            "name": self.name,
            "classes": self.classes,
            "channels": self.channels,
            "size": self.size,
        }
        return Task(**(native | overrides))

    def images(self, split: str, task: Task) -> Images:
        """Read a split under the task's policy. Labels are positions in ``task.classes``, by name.

        Raises:
            DataError: no such split, a class that the task does not have, or unusable records.
        """
        if split not in self.splits:
            hint = did_you_mean(split, self.splits)
            raise DataError(
                f"the split of '{self.name}' must be one of {list(self.splits)}. Got '{split}'."
                f"{hint}"
            )
        ids = self._ids(task)
        records = self.read(split)
        labels, where = records.labels, f"{self.name}/{split}"
        if len(records.pixels) != len(labels):
            raise DataError(
                f"'{where}' must have one label per image. Got {len(records.pixels)} images and "
                f"{len(labels)} labels"
            )
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.classes):
            raise DataError(
                f"labels of '{where}' must lie in 0..{len(self.classes) - 1}. Got "
                f"{labels.min()}..{labels.max()}"
            )
        if isinstance(records.pixels, np.ndarray):
            pixels = convert(records.pixels, task, where)
        else:
            pixels = stack(records.pixels, task)
        warn_near_black(pixels, where)
        groups = None if records.groups is None else torch.from_numpy(records.groups)
        return Images(pixels, torch.from_numpy(ids[labels]), task.classes, groups)

    def prefer(self, split: str, task: Task) -> Images:
        """Read a split, or the first one where there is none of that name. See `images`."""
        return self.images(split if split in self.splits else self.splits[0], task)

    def _ids(self, task: Task) -> Array:
        """Return the task's label of each of the source's classes."""
        unknown = [c for c in self.classes if c not in task.classes]
        if unknown:
            raise DataError(
                f"every class of '{self.name}' must be a class of the task. Got {unknown}: source "
                f"{list(self.classes)}, task {list(task.classes)}"
            )
        return np.array([task.classes.index(c) for c in self.classes], np.int64)


def one_test_split(found: Mapping[str, T]) -> dict[str, T]:
    """Order splits; a ``val`` without a ``test`` is the test split (ImageNet's convention)."""
    if "val" in found and "test" not in found:
        found = {"test" if k == "val" else k: v for k, v in found.items()}
    return {k: found[k] for k in ORDER if k in found}


def group_ids(names: Iterable[Any]) -> dict[Any, int]:
    """Number distinct group names in sorted order."""
    return {name: i for i, name in enumerate(sorted(set(names)))}
