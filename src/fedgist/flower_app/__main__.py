"""Start a run on a SuperLink, wait until it ends, and exit with the truth.

::

    python -m fedgist.flower_app SUPERLINK task=task.toml key=coordinator.key out=results

`flwr run` exits with 0 whether or not the run succeeds. This exits with 0 when the run and the task
are finished, 1 when they failed, 2 when nothing could be started.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedgist.errors import ConfigError, FedGistError, MissingExtra, ProtocolError
from fedgist.flower_app.coordinator import result_file
from fedgist.flower_app.switches import SWITCHES

__all__ = ["main", "read_result", "start_run", "wait_for"]

APP = Path(__file__).parent
PATHS = ("task", "key", "out", "state")
KEYS = (*PATHS, "test", "wait")
POLL = 0.5  # seconds between two looks for the result
ASK = 15.0  # seconds between two questions to the SuperLink


def start_run(superlink: str, config: Mapping[str, str | float]) -> str:
    """Start a run of the app; return its number.

    Args:
        superlink: name of a SuperLink in ``$FLWR_HOME/config.toml``.
        config: values of the app's configuration; paths may be relative to here, but not ``test``,
            which may be the name of a set.

    Raises:
        ProtocolError: the SuperLink did not take it.
    """
    full = {k: os.path.abspath(str(v)) if k in PATHS and v else v for k, v in config.items()}
    with tempfile.TemporaryDirectory() as folder:
        values = Path(folder) / "run.toml"
        values.write_text(tomli_w.dumps(full), encoding="utf-8")
        said = _flwr("run", str(APP), superlink, "-c", str(values))
    return str(said["run-id"])


def wait_for(run: str, superlink: str, result: Path, *, poll: float = POLL) -> str:
    """Wait until a run ends; return its status, such as ``finished:completed``.

    The SuperLink is asked seldom, since a `flwr` command costs a second of work, and at once when
    the coordinator has left its result.
    """
    asked = -math.inf
    while True:
        if read_result(result, run) is not None or time.monotonic() > asked + ASK:
            status = str(_flwr("list", superlink, "--run-id", run)["runs"][0]["status"])
            if status.startswith("finished"):
                return status
            asked = time.monotonic()
        time.sleep(poll)


def read_result(path: Path, run: str) -> dict[str, Any] | None:
    """Return what the coordinator wrote of how this run ended, or None."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("run") == run else None


def main(arguments: Sequence[str]) -> int:
    """Start, wait, print the result as JSON; return the exit code."""
    try:
        superlink, config = _parse(arguments)
        run = start_run(superlink, config)
        print(f"run {run}; its log: flwr log {run} {superlink}", file=sys.stderr, flush=True)
        path = result_file(Path(str(config["out"])))
        status = wait_for(run, superlink, path)
    except FedGistError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    # A SuperLink on another machine leaves its result there; then Flower's status has to do.
    result = read_result(path, run) or {"run": run, "status": "finished"}
    print(json.dumps(result | {"flower": status}, indent=1))
    return 0 if (result["status"], status) == ("finished", "finished:completed") else 1


def _parse(arguments: Sequence[str]) -> tuple[str, dict[str, str | float]]:
    config: dict[str, str | float] = {}
    for word in arguments[1:]:
        key, equals, value = word.partition("=")
        if key not in KEYS or not equals:
            raise ConfigError(f"a setting must be one of {list(KEYS)} = value. Got '{word}'")
        config[key] = float(value) if key == "wait" else value
    if missing := [k for k in ("task", "key", "out") if not config.get(k)]:
        raise ConfigError(
            "usage: python -m fedgist.flower_app SUPERLINK task=FILE key=FILE out=FOLDER. "
            f"Got no {', '.join(missing)}"
        )
    return arguments[0], config


def _flwr(*words: str) -> dict[str, Any]:
    """Run a `flwr` command and return what it says as JSON."""
    command = Path(sys.executable).with_name("flwr")
    if not command.exists():
        raise MissingExtra("flwr", "flower")
    done = subprocess.run(
        [command, *words, "--format", "json"],
        env=os.environ | SWITCHES,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        said = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        said = {"success": False, "error-message": (done.stderr or done.stdout).strip()}
    if not said.get("success"):
        lines = str(said.get("error-message", "no reason")).strip().splitlines()
        raise ProtocolError(f"`flwr {words[0]}` must succeed. Got: {lines[-1] if lines else ''}")
    return dict(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
