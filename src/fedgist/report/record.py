"""report.json: strict JSON, one record a line where it fits, put in place whole or not at all.

JSON has no infinity. A float ``inf``, ``-inf`` or ``nan`` is written as the string of that name and
read back as the float. A text that happens to be such a string (a class called "inf") gets a
backslash in front, so nothing changes on the way.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fedgist import __version__
from fedgist.errors import DataError
from fedgist.whole import write_whole

__all__ = ["decode", "read_json", "to_json", "versions", "write_json"]

PACKAGES = (
    "cryptography",
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "pillow",
    "safetensors",
    "dp-accounting",
    "opendp",
    "flwr-datasets",
    "diffusers",
)
WIDTH = 110  # a value that fits goes on one line
SPECIAL = re.compile(r"\\*(inf|-inf|nan)")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain JSON values (floats may be infinite) to ``path``.

    Raises:
        ConfigError: the file cannot be written.
        DataError: a value is not plain JSON; the message names its place.
    """
    text = _text(_encode(data, "report"), "")
    # A lone surrogate (an undecodable byte of a file name) becomes its JSON escape \udcXX.
    write_whole(path, (text + "\n").encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        DataError: there is no such file, or it is not a JSON object.
    """
    try:
        data = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f"a report must be a JSON file. Got '{path}': {e}") from e
    if not isinstance(data, dict):
        raise DataError(f"a report must be a JSON object. Got '{path}': {type(data).__name__}")
    return {k: decode(v) for k, v in data.items()}


def versions() -> dict[str, str]:
    """Return the versions of Python, FedGist and the installed packages that results depend on."""
    found = {"python": platform.python_version(), "fedgist": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"system": f"{platform.system()} {platform.machine()}"}


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return "\\" + value if SPECIAL.fullmatch(value) else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DataError(f"keys of {where} must be text. Got {key!r}")
        return {k: _encode(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    raise DataError(f"{where} must be a plain JSON value. Got {type(value).__name__}")


def decode(value: Any) -> Any:
    """Turn what JSON holds back into what was written: infinite numbers, escaped texts."""
    if isinstance(value, str) and SPECIAL.fullmatch(value):
        return value[1:] if value.startswith("\\") else float(value)
    if isinstance(value, dict):
        return {k: decode(v) for k, v in value.items()}
    return [decode(v) for v in value] if isinstance(value, list) else value


def _text(value: Any, indent: str) -> str:
    """Lay out JSON so that a person can read it: a list of numbers is one line, not hundreds."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    children = value.values() if isinstance(value, dict) else value
    leaf = not isinstance(value, dict | list) or not value
    if leaf or len(indent) + len(flat) <= WIDTH:
        return flat
    if isinstance(value, list) and not any(isinstance(v, dict | list) for v in children):
        return flat
    deeper = indent + "  "
    if isinstance(value, dict):
        rows = [
            f"{json.dumps(k, ensure_ascii=False)}: {_text(v, deeper)}" for k, v in value.items()
        ]
    else:
        rows = [_text(v, deeper) for v in value]
    left, right = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{left}\n{deeper}" + f",\n{deeper}".join(rows) + f"\n{indent}{right}"


def _refuse(name: str) -> Any:
    raise ValueError(f"'{name}' is not JSON")


def to_json(value: Any) -> str:
    """Return plain values as strict JSON text; infinite numbers become ``"inf"``."""
    return _text(_encode(value, "result"), "")
