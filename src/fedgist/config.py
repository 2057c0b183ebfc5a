"""One run as data: TOML, command-line ``--set`` and defaults, validated, written back resolved.

Precedence: default < file < command line. Defaults live where they are used (the dataclasses of the
method, its recipe and `Privacy`), and nowhere else.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fedgist.errors import ConfigError, did_you_mean
from fedgist.method import Method, method_class
from fedgist.privacy.claim import Privacy

__all__ = [
    "Data",
    "Evaluation",
    "Run",
    "Strict",
    "TaskOptions",
    "dumps",
    "load",
    "make_method",
    "plain_toml",
    "read_strict",
    "settings",
    "validated",
]

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A table whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Strict):
    """Where the images are and how a simulation deals them out."""

    source: str = "fashion-mini"
    """A named set, a file or a folder."""
    test: str | None = None
    """Real images to test on; by default the source's own test split."""
    sites: tuple[str, ...] = ()
    """One source per client, instead of a partition of ``source``."""
    clients: int = Field(default=10, ge=1)
    partition: str = "dirichlet:0.5"
    participation: float = Field(default=1.0, gt=0, le=1)
    """Share of the clients that take part, drawn by the seed."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many images of the source (the first after a seeded shuffle)."""
    held_out: float | None = Field(default=None, gt=0, lt=1)
    """Set this share of the training images aside, drawn by the seed, and test on them, not on the
    test split: settings are chosen so, never by test images."""

    @model_validator(mode="after")
    def _one_test_set(self) -> Data:
        if self.held_out is not None and (self.test is not None or self.sites):
            raise ValueError("held_out must go with a source alone, without test or sites")
        return self


class TaskOptions(Strict):
    """What the sites agree on; None takes the source's own."""

    name: str | None = None
    classes: tuple[str, ...] | None = None
    channels: Literal[1, 3] | None = None
    size: int | None = None
    fit: Literal["stretch", "crop", "pad"] | None = None
    max_images: int | None = None


class Evaluation(Strict):
    """What is measured after the run; a real federation has no such data in one place."""

    ceiling: bool = True
    """The same heads without noise, and the same network trained on the real images."""
    curve: bool = True
    """The closed-form heads at other ε, from the same sums; needs ``ceiling``, seeded noise and a
    finite ε."""
    codec_consistent: bool = True
    """Test images through the codec, as a number of its own."""
    membership: bool = False
    """The exact likelihood-ratio attack and the distance to the closest synthetic image."""
    inversion: bool = False
    """For methods that send something of every image: rebuild images from uploads, and find them in
    a gallery, as the server could."""
    decoder_steps: int = Field(default=1500, ge=0)
    """Updates of each network that learns to rebuild them."""
    personalise: bool = False
    """Fine-tune the network at every client; report local accuracy before and after."""


class Run(Strict):
    """Everything that decides a run's result."""

    seed: int = Field(default=0, ge=0)
    data: Data = Data()
    task: TaskOptions = TaskOptions()
    privacy: Privacy = Privacy()
    method: dict[str, Any] = {"name": "fedkt_csd"}
    evaluation: Evaluation = Evaluation()


def load(path: str | os.PathLike[str] | None = None, sets: Iterable[str] = ()) -> Run:
    """Read a run from a TOML file (or the defaults) and apply ``key=value`` settings.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value; the message names the key.
    """
    raw = settings(sets, {} if path is None else _toml(Path(path), "config"))
    if isinstance(raw.get("method"), str):
        raw["method"] = {"name": raw["method"]}
    try:
        run = Run.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(_first(e, "", raw)) from None
    method = make_method(run)
    return run.model_copy(update={"method": {"name": _name(run)} | _plain(method)})


def settings(sets: Iterable[str], over: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return ``key=value`` settings as tables, laid over others."""
    raw = {} if over is None else over
    for item in sets:
        _assign(raw, item)
    return raw


def make_method(run: Run) -> Method:
    """Build the method that a run names, with its fields validated."""
    cls = method_class(_name(run))
    fields = {k: _over(cls, k, v) for k, v in run.method.items() if k != "name"}
    try:
        method: Method = TypeAdapter(cls).validate_python(fields)
    except ValidationError as e:
        raise ConfigError(_first(e, "method.", fields)) from None
    return method


def read_strict(path: Path, kind: type[Model], what: str) -> Model:
    """Read a TOML file into a model.

    Raises:
        ConfigError: unreadable, an unknown key, a wrong value; the message names file and key.
    """
    return validated(kind, _toml(path, what), str(path))


def validated(kind: type[Model], raw: Mapping[str, Any], where: str) -> Model:
    """Build a model; ConfigError names ``where`` and the key that is wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as e:
        # an unknown key is often the one that another is missing for
        first = min(e.errors(), key=lambda error: error["type"] != "extra_forbidden")
        key = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(key, kind.model_fields)
            raise ConfigError(f"{where}: unknown key {key}.{hint}") from None
        if first["type"] == "missing":
            raise ConfigError(f"{where}: {key} must be there. Got none") from None
        raise ConfigError(
            f"{where}: {key} is wrong: {first['msg']}. Got {first.get('input')!r}"
        ) from None


def _over(cls: type[Method], key: str, value: Any) -> Any:
    """Lay a table over the method's own default for it: one key changed leaves the others."""
    default = getattr(cls, key, None)
    if isinstance(value, Mapping) and is_dataclass(default) and not isinstance(default, type):
        return asdict(default) | dict(value)
    return value


def dumps(run: Run) -> str:
    """Return the run as TOML that `load` reads back to an equal run."""
    return tomli_w.dumps(plain_toml(run.model_dump(mode="python")))


def _name(run: Run) -> str:
    name = run.method.get("name", "fedkt_csd")
    if not isinstance(name, str):
        raise ConfigError(f"method.name must be text. Got {name!r}")
    return name


def _assign(raw: dict[str, Any], item: str) -> None:
    """Apply one ``a.b=value``; the value is TOML, or plain text where it is not."""
    key, sep, text = item.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"--set must be key=value. Got '{item}'")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    table = raw
    for part in path:
        inner = table.setdefault(part, {})
        if part == "method" and isinstance(inner, str):
            inner = table["method"] = {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set must name a key inside a table. Got '{key}'")
        table = inner
    table[last] = value


def _first(error: ValidationError, prefix: str, raw: Mapping[str, Any]) -> str:
    """Say the first thing that is wrong in one line."""
    first = error.errors()[0]
    loc = [str(p) for p in first["loc"]]
    key = prefix + ".".join(loc)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known(error.title, loc[:-1], prefix)
        hint = did_you_mean(loc[-1], known)
        return f"unknown key {key}.{hint or ' Known: ' + ', '.join(sorted(known))}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{key} is wrong: {message}. Got {first['input']!r}"


def _known(title: str, path: list[str], prefix: str) -> list[str]:
    """List the keys of the table that an unknown key was found in."""
    here: Any = Run
    if prefix:
        here = next(
            (c for c in _methods() if c.__name__ == title.removeprefix("dataclass ")), Method
        )
    for part in path:
        hints = getattr(here, "__annotations__", {})
        here = _resolve(here, hints.get(part))
    if isinstance(here, type) and issubclass(here, BaseModel):
        return list(here.model_fields)
    return list(getattr(here, "__dataclass_fields__", {}))


def _resolve(owner: Any, hint: Any) -> Any:
    import sys

    if isinstance(hint, str):
        return vars(sys.modules[owner.__module__]).get(hint.split(" ")[0])
    return hint


def _methods() -> list[type[Method]]:
    found, todo = [], list(Method.__subclasses__())
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return found


def _plain(value: Any) -> Any:
    """Turn a dataclass into plain tables."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def plain_toml(value: Any) -> Any:
    """Turn dataclasses and tuples into tables and lists; leave out what is None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {k: plain_toml(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [plain_toml(v) for v in value]
    return value


def _toml(path: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{what} must be a readable file. Got {path} ({e.strerror})") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{what} must be valid TOML. Got {path}: {e}") from e
