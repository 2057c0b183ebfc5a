"""The folder that a run leaves: classifiers, synthetic images, report."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedgist.errors import ConfigError
from fedgist.privacy.claim import Claim
from fedgist.report.cards import privacy_card
from fedgist.report.export import save_classifier, write_synthetic
from fedgist.report.figures import samples_png
from fedgist.report.page import write_page
from fedgist.report.record import write_json
from fedgist.types import Outcome, Task

__all__ = ["Clock", "claim_folder", "file_row", "write_outcome", "write_report"]


def write_outcome(
    outcome: Outcome, folder: Path, task: Task, claim: Claim, title: str
) -> list[dict[str, Any]]:
    """Write classifiers and images as soon as they exist: nothing computed is lost later.

    Returns:
        One row for each file, for the report.
    """
    files: list[dict[str, Any]] = []
    extra = {
        "claim": claim.line(),
        "title": title,
        "task": json.dumps(asdict(task), ensure_ascii=False),
    }
    stale = set(folder.glob("classifier*.safetensors"))
    for i, (name, classifier) in enumerate(outcome.classifiers.items()):
        path = folder / ("classifier.safetensors" if i == 0 else f"classifier-{name}.safetensors")
        stale.discard(path)
        save_classifier(classifier, path, extra | {"head": name})
        files.append(file_row(path, f"classifier '{name}'" + (", the first asked for" * (i == 0))))
    for path in stale:  # of an earlier run with other heads: it would pass for this run's
        path.unlink()
    if outcome.synthetic is not None:
        files += write_synthetic(outcome.synthetic, folder, claim.record(), title)
        samples_png(outcome.synthetic, folder / "samples.png")
        files.append(file_row(folder / "samples.png", "a look at the synthetic images"))
    return files


def write_report(report: dict[str, Any], outcome: Outcome, folder: Path, config: str) -> None:
    """Write report.json, report.html and the privacy card; ``config``: the file of the settings."""
    page, record = folder / "report.html", folder / "report.json"
    card = folder / "privacy-card.json"
    report["files"] += [
        file_row(folder / config, "what was run: the resolved configuration"),
        {"path": card.name, "what": "the claim by the layers of NIST SP 800-226", "bytes": None},
        {"path": record.name, "what": "everything measured", "bytes": None},
        {"path": page.name, "what": "the same, to read", "bytes": None},
    ]
    write_json(record, report)
    write_page(report, outcome.synthetic, page)
    write_json(card, privacy_card(report))


def file_row(path: Path, what: str) -> dict[str, Any]:
    """Return one row of the report's table of files."""
    return {"path": path.name, "what": what, "bytes": path.stat().st_size}


def claim_folder(folder: Path) -> None:
    """Make sure that results can be written before minutes are spent on them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        raise ConfigError(f"--out must be a writable folder. Got {folder} ({e.strerror})") from e


class Clock:
    """Seconds by stage, and in all."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {"total": 0.0}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap under a name."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self.laps["total"] += now - self._last
        self._last = now
