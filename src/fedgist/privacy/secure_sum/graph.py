"""How many neighbours each of many sites needs in a secure sum, by probability of failure."""

from __future__ import annotations

import math

from fedgist.errors import ConfigError

__all__ = ["choose_graph"]

COMPLETE = 200  # up to here all pairs are affordable, and every member makes sure of one list


def choose_graph(
    sites: int, dropouts: int, colluders: int, failure: float = 2.0**-30
) -> tuple[int | None, int]:
    """Return the smallest ``degree`` (None: all pairs) and its ``threshold`` for `Terms`.

    Up to 200 sites all pairs are joined. Above, with k neighbours and threshold t, a random order
    of the circle fails when somewhere

    - more than k - t of a site's k neighbours drop out: its secrets cannot be rebuilt;
    - 2t - k - 1 or more of a site's k neighbours collude: a server that breaks the rules could
      then split the honest rest of the neighbourhood (`Terms.colluders`);
    - k / 2 sites in a row drop out or collude: the only way to cut the honest survivors in two.

    Counts in a neighbourhood are hypergeometric; a union bound runs over the sites. Both sets of
    sites must be fixed before the order is known.

    Args:
        sites: how many are rostered.
        dropouts: how many of them may be lost, over all stages.
        colluders: how many of them may side with the server.
        failure: bound on the probability of any of the three, over the order of the circle.

    Raises:
        ConfigError: not even the complete graph bears so many losses and colluders.
    """
    for k in range(2, sites - 1, 2) if sites > COMPLETE else ():
        t = _threshold(sites, k, dropouts, colluders, failure / 3)
        if t is not None and _log_cut(sites, k, dropouts + colluders) <= math.log(failure / 3):
            return k, t
    t = sites - dropouts
    if 2 * t <= sites + colluders:
        raise ConfigError(
            f"dropouts must be fewer than {-(-(sites - colluders) // 2)} of {sites} sites with "
            f"{colluders} colluders. Got {dropouts}"
        )
    return None, t


def _threshold(n: int, k: int, dropouts: int, colluders: int, failure: float) -> int | None:
    """Return the largest threshold that drop-outs allow, if it holds against the colluders."""
    t = k - _most(n - 1, dropouts, k, failure / n)
    return t if 2 * t > k + 1 + _most(n - 1, colluders, k, failure / n) else None


def _most(n: int, marked: int, k: int, failure: float) -> int:
    """Return the smallest m for which k of n sites hold more than m of ``marked`` so rarely.

    The tail is summed from its far end, where its terms are smallest: scipy's inverse breaks down
    below 1e-16.
    """
    whole, tail = _log_choose(n, k), 0.0
    for m in range(min(k, marked), -1, -1):
        if k - m <= n - marked:
            tail += math.exp(_log_choose(marked, m) + _log_choose(n - marked, k - m) - whole)
        if tail > failure:
            return m
    return 0


def _log_cut(n: int, k: int, away: int) -> float:
    """Return the logarithm of n times the probability that k/2 given places are all away."""
    half = k // 2
    if half > away:
        return -math.inf
    return math.log(n) + _log_choose(n - half, away - half) - _log_choose(n, away)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
