"""Emoji in three drawing styles with the same nine labels: one site per style, ready domain shift.

``scripts/get_emoji.sh`` unpacks the npm packages to ``emoji/`` in the cache: ``emoji.json`` (the
labels) and one folder of images per style.

========== =================================== ============== ============ ==============
style      npm package                         licence        base emoji   image on disk
========== =================================== ============== ============ ==============
google     emoji-datasource-google 16.0.0      Apache-2.0     1,906        64x64 PNG
twitter    emoji-datasource-twitter 16.0.0     CC-BY-4.0      1,906        64x64 PNG
fluent     @lobehub/fluent-emoji-3d 1.1.0      MIT            1,852        256x256 WebP
========== =================================== ============== ============ ==============

The split is by emoji: every fifth of a category, in the order of ``emoji.json``, is a test emoji in
every style and skin tone. Entries of the category "Component" are left out, and so are the styles
whose images are not free (Apple, Facebook). Some emoji are drawn alike: 3 of
377 Google and 6 of 377 Twitter test images equal a training image of their style.

Three styles as three sites: ``source = "emoji"``, ``partition = "natural"``, ``clients = 3``; or
``sites = ["emoji-google", "emoji-twitter", "emoji-fluent"]``, ``test = "emoji"``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.data.images import Encoded
from fedgist.data.records import TEST_EVERY, Records, Source
from fedgist.errors import DataError

__all__ = ["CATEGORIES", "STYLES", "open_emoji"]

CATEGORIES = (
    "Activities",
    "Animals & Nature",
    "Flags",
    "Food & Drink",
    "Objects",
    "People & Body",
    "Smileys & Emotion",
    "Symbols",
    "Travel & Places",
)
STYLES = {  # style -> suffix and licence of its images; the position is the group number
    "google": (".png", "Apache-2.0"),
    "twitter": (".png", "CC-BY-4.0"),
    "fluent": (".webp", "MIT"),
}
SIZE = 64
HOW = "run scripts/get_emoji.sh of FedGist's repository, which needs npm"


@dataclass(frozen=True)
class _Emoji:
    label: int
    test: bool
    stems: tuple[str, ...]  # the emoji itself, then its skin tones


def open_emoji(folder: Path, style: str | None = None, *, skins: bool = False) -> Source:
    """Open one style, or all styles that are present with the style as group.

    Args:
        folder: where ``emoji.json`` and the styles' folders lie.
        style: a key of ``STYLES``; None joins those that are present, style by style. A
            partition ``natural`` then makes each style one client.
        skins: skin tones too (Google and Twitter: 1,875 more each, all "People & Body").

    Raises:
        DataError: the labels or every image is missing, or ``emoji.json`` is damaged.
    """
    present = [s for s in STYLES if s == (style or s) and (folder / s).is_dir()]
    if not present or not (folder / "emoji.json").is_file():
        what = f"emoji.json and {style}/" if style else "emoji.json and a style's folder"
        raise DataError(f"'{folder}' must hold {what}. Got none: {HOW}")
    emoji = _labels(folder / "emoji.json")
    return Source(
        name=f"emoji{f'-{style}' if style else ''}{'-skins' if skins else ''}",
        classes=CATEGORIES,
        channels=3,
        size=SIZE,
        splits=("train", "test"),
        licence=", ".join(STYLES[s][1] for s in present),
        read=partial(_read, folder, present, emoji, style is None, skins),
    )


def _labels(path: Path) -> list[_Emoji]:
    """Read what the entries of ``emoji.json`` are, and which are test emoji."""
    try:
        entries = json.loads(path.read_bytes())
        rows = [(e["category"], _stems(e)) for e in entries if e["category"] != "Component"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(
            f"'{path}' must be the emoji.json of emoji-datasource 16.0.0. Got {type(e).__name__}: "
            f"{e}. Fetch it anew: {HOW}"
        ) from e
    if unknown := sorted({c for c, _ in rows} - set(CATEGORIES)):
        raise DataError(f"categories of '{path}' must be {list(CATEGORIES)}. Got also {unknown}")
    seen: Counter[str] = Counter()
    out = []
    for category, stems in rows:
        test = seen[category] % TEST_EVERY == TEST_EVERY - 1
        out.append(_Emoji(CATEGORIES.index(category), test, stems))
        seen[category] += 1
    return out


def _stems(entry: dict[str, Any]) -> tuple[str, ...]:
    tones = entry.get("skin_variations", {}).values()
    return tuple(Path(e["image"]).stem for e in (entry, *tones))  # a stem: never another folder


def _read(
    folder: Path, styles: list[str], emoji: list[_Emoji], grouped: bool, skins: bool, split: str
) -> Records:
    files, labels, groups = [], [], []
    for group, (style, (suffix, _)) in enumerate(STYLES.items()):
        if style not in styles:
            continue
        there = {p.name for p in (folder / style).iterdir()}
        for e in (e for e in emoji if e.test == (split == "test")):
            for stem in e.stems if skins else e.stems[:1]:
                if (name := stem + suffix) in there:  # no style draws every emoji
                    files.append(Encoded(f"{style}/{name}", folder / style / name))
                    labels.append(e.label)
                    groups.append(group)
    ids = np.array(groups, np.int64) if grouped else None
    return Records(files, np.array(labels, np.int64), ids)
