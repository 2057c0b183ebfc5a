"""What a method is, and how it is found by name.

One method is one file in `fedgist/methods/`; the file's name is the method's name. A dotted name
(``mypkg.mymethod``) loads a third party's. There is no registry.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgist.errors import ConfigError, did_you_mean
from fedgist.privacy.client import Client, Sensitive
from fedgist.types import Images, Merged, Outcome, Round, State, Task, Tensors

__all__ = ["Exposing", "Gist", "Method", "Picturing", "method_class", "method_names"]

# Tensors for a pool round; for a sum round the answers to its queries, in the plan's order.
Gist = Tensors | Sensitive | tuple[Sensitive, ...]


class Method(ABC):
    """One algorithm, client side and server side. Subclasses are final frozen dataclasses."""

    @abstractmethod
    def plan(self, task: Task) -> Sequence[Round]:
        """Declare every round and every noisy query, from public facts alone."""

    def encoders(self) -> tuple[str, ...]:
        """Name the frozen encoders that clients use: the task pins the hash of each."""
        return ()

    @property
    def unfit(self) -> str:
        """Why it must not meet real data, as its claim says too; empty where nothing forbids it."""
        return ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of its claim must know besides ε."""
        return ()

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Return the server's first state; empty where there is nothing to broadcast."""
        return State()

    @abstractmethod
    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Meet the data of one client in round ``r``. The only code of a method that does."""

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Take in what the exchange merged (for a sum round: noised int64 sums); keep it as is."""
        return State(server=merged)

    @abstractmethod
    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Turn the state into the outcome. Post-processing only: no data is in reach."""


@runtime_checkable
class Exposing(Protocol):
    """What else a method has whose clients send something of every image: attacks go through it."""

    @property
    def random(self) -> bool:
        """Whether the same image is sent differently every time."""

    def used(self, images: Images) -> Images:
        """Return images of a client that may be among those sent."""

    def uploaded(self, task: Task, shared: Tensors, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return what the server makes out of an upload, ``[b, k, y, y]`` in [0, 1]."""


@runtime_checkable
class Picturing(Protocol):
    """What else a method has whose sums can be made visible: images that stand for each class."""

    def pictures(
        self, task: Task, merged: Merged, per_class: int, rng: torch.Generator
    ) -> Images | None:
        """Make images from sums, noised or not; a class the sums do not show has none.

        None where these options send nothing that images can be made from.
        """


def method_names() -> list[str]:
    """List the methods that ship with FedGist."""
    folder = Path(__file__).parent / "methods"
    return sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if m.name[0] != "_")


def method_class(name: str) -> type[Method]:
    """Return the one `Method` defined in ``fedgist.methods.<name>`` or in a dotted module.

    Raises:
        ConfigError: no such module, or not exactly one method in it.
    """
    if "." not in name and name not in method_names():
        known = method_names()
        raise ConfigError(
            f"method.name must be one of {known} or a dotted module name. Got '{name}'."
            + did_you_mean(name, known)
        )
    path = name if "." in name else f"fedgist.methods.{name}"
    try:
        module = importlib.import_module(path)
    except ImportError as e:
        raise ConfigError(f"method.name must be an importable module. Got '{name}' ({e})") from e
    found = [
        v
        for v in vars(module).values()
        if isinstance(v, type)
        and issubclass(v, Method)
        and v is not Method
        and v.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ConfigError(f"module '{path}' must define exactly one Method. Got {len(found)}")
    return found[0]
