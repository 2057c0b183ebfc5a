"""What all pages share: where templates are, and how numbers and times read in them."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache

import jinja2

from fedgist.report import numbers

__all__ = ["moment", "template"]


def template(name: str) -> jinja2.Template:
    """Return a template of ``fedgist/report/template``; an unknown name in it is an error."""
    return _environment().get_template(name)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("fedgist", "report/template"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "amount": numbers.amount,
        "bytes": numbers.size,
        "epsilon": numbers.epsilon,
        "odds": numbers.odds,
        "percent": numbers.percent,
        "points": numbers.points,
        "power": numbers.power,
        "rate": numbers.rate,
        "seconds": numbers.seconds,
    }
    return env


def moment(created: str) -> str:
    """Return an ISO 8601 time as people write it; anything else as it is."""
    try:
        t = datetime.fromisoformat(created)
    except ValueError:
        return created
    return f"{t.day} {t:%B %Y, %H:%M} {t.tzname() or ''}".strip()
