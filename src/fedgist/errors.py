"""Every error FedGist raises on purpose.

::

    FedGistError                 catch this to catch them all
    ├── ConfigError              an option, a TOML key or a file name is wrong      (exit 2)
    ├── DataError                a file, a folder or an image cannot be used        (exit 2)
    ├── EncoderError             an encoder is missing, altered or unusable codes    (exit 2)
    ├── MissingExtra             an optional package is not installed               (exit 2)
    ├── ProtocolError            a message, key or stage of an exchange is wrong    (exit 2)
    │   └── Awaiting             a gist waits for a person's decision: nothing is wrong
    └── PrivacyError             something would leave that must not                (exit 2)
        ├── UnplannedQuery       a method asked a client for more than its plan states
        └── Withheld             a person refused to send a gist

Messages have one form: "X must be Y. Got Z", then what to do about it when that is not obvious.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "Awaiting",
    "ConfigError",
    "DataError",
    "EncoderError",
    "FedGistError",
    "MissingExtra",
    "PrivacyError",
    "ProtocolError",
    "UnplannedQuery",
    "Withheld",
    "did_you_mean",
]


class FedGistError(Exception):
    """Base of every error that FedGist raises on purpose."""


class ConfigError(FedGistError):
    """An option, a TOML key or an output folder is wrong."""


class DataError(FedGistError):
    """A file, a folder or an image cannot be used."""


class EncoderError(FedGistError):
    """An encoder is missing, is not the one the task names, or gave codes that cannot be used."""


class MissingExtra(FedGistError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} must be installed. Run: pip install 'fedgist[{extra}]'")


class ProtocolError(FedGistError):
    """A message, a key or a stage of an exchange is not what the task allows."""


class Awaiting(ProtocolError):
    """A gist waits for a decision: nothing was sent, nothing is wrong."""


class PrivacyError(FedGistError):
    """Something would leave a client that must not."""


class UnplannedQuery(PrivacyError):
    """A method asked a client for more than its plan states."""


class Withheld(PrivacyError):
    """The person who answers for the data refused to send a gist."""


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest of ``known``, or an empty string."""
    close = difflib.get_close_matches(got, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
