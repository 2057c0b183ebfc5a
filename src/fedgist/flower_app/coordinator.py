"""The coordinator's work inside a ServerApp, and the file that says how it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgist.errors import ConfigError
from fedgist.exchange.store import write_durably
from fedgist.exchange.transport import Transport
from fedgist.progress import Progress, Visit

if TYPE_CHECKING:  # it loads PyTorch, which a node's ClientApp has no use for
    from fedgist.agreement import Agreement

__all__ = ["Spoken", "coordinate_over", "result_file"]

Connect = Callable[..., Transport]  # see `fedgist.exchange.flower.Connect`


class Spoken(Progress):
    """Says what happens, line by line, for the log of the run."""

    def stage(self, text: str) -> None:
        """See `Progress`."""
        print(f"fedgist: {text}", flush=True)

    def client(self, done: int, total: int, visit: Visit) -> None:
        """See `Progress`."""
        size = f"{visit.bytes_up:,} bytes"
        print(f"fedgist: {done} of {total}: {visit.client}, {size}", flush=True)


def coordinate_over(connect: Connect, config: Mapping[str, Any]) -> None:
    """Run a task over nodes, as the run's configuration says.

    ``OUT.result.json`` beside the folder of results says how it ended: the run's number, status,
    error, which site was which node, and what was noticed about nodes that are not used.

    Args:
        connect: given roster, seconds for nodes to appear, patience and whom to tell, returns the
            transport.
        config: see ``pyproject.toml``; also ``run``, the run's number.

    Raises:
        FedGistError: in one line, what went wrong.
    """
    from fedgist.federation import coordinate  # seconds of imports that nodes can do without

    if missing := [k for k in ("task", "key", "out") if not config.get(k)]:
        raise ConfigError(f"the run's configuration must give {', '.join(missing)}. Got none")
    out = Path(config["out"])
    result: dict[str, Any] = {"run": str(config["run"]), "status": "failed", "error": None}
    result |= {"nodes": {}, "notes": []}

    def note(text: str) -> None:
        print(f"fedgist: {text}", flush=True)
        result["notes"].append(text)

    def transport(agreement: Agreement, _: Path) -> Transport:
        wait, patience = float(config["wait"]), agreement.exchange.patience
        made = connect(agreement.roster, wait, patience, note)
        result["nodes"] = {k: str(v) for k, v in getattr(made, "sites", {}).items()}
        return made

    try:
        report = coordinate(
            Path(config["task"]),
            Path(config["key"]),
            Path(config["state"]) if config.get("state") else None,
            transport,
            out,
            test=config.get("test") or None,
            progress=Spoken(),
        )
        result |= {"status": "finished", "faults": report["claim"]["notes"]}
    except BaseException as e:
        result["error"] = str(e) or type(e).__name__
        raise
    finally:
        result_file(out).parent.mkdir(parents=True, exist_ok=True)
        write_durably(result_file(out), json.dumps(result, indent=1).encode() + b"\n")


def result_file(out: Path) -> Path:
    """Return the file that says how a run into ``out`` ended."""
    return Path(os.path.abspath(out) + ".result.json")
