"""What a claim lets attacks on the presence of one record reach: the limit in tables and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.audit.membership import FPRS, Risk, claimed
from fedgist.audit.roc import Bound, Curve, approximate_dp, area, closed_form
from fedgist.privacy.accounting import sigma_for
from fedgist.privacy.claim import Claim
from fedgist.queries import SumQuery
from fedgist.types import Round

__all__ = ["Limit", "limit_of"]


@dataclass(frozen=True)
class Limit:
    """What no attack exceeds, in expectation, if a claim holds.

    Attributes:
        risk: area under the ROC curve, and true-positive rates at 0.1 % and 1 % false ones.
        curve: the same at all rates of the grid.
        bound: ``gaussian`` for the trade-off of one Gaussian, ``approximate`` for what (ε, δ) alone
            says.
        epsilon: whose ε it is: the claim's, or its reading under add-remove.
        delta: of the claim.
        mu: of the Gaussian, or None.
    """

    risk: Risk
    curve: Curve
    bound: Bound
    epsilon: float
    delta: float
    mu: float | None

    def record(self) -> dict[str, Any]:
        """Return plain JSON values, with the curve as ``roc``."""
        names = ("bound", "epsilon", "delta", "mu")
        return {k: getattr(self, k) for k in names} | {"roc": self.curve.record()}


def limit_of(claim: Claim, rounds: Sequence[Round]) -> Limit | None:
    """Return the limit on attacks that ask whether one record was there at all.

    A claim about replacement bounds that only through the reading of its noise under add-remove.

    Args:
        claim: what is promised.
        rounds: of the plan: sampled queries have no Gaussian trade-off.

    Returns:
        None where nothing is promised.
    """
    epsilon, delta = claim.epsilon, claim.delta
    if claim.adjacency != "add-remove":
        epsilon = claim.readings.get("add-remove", math.inf)
    if not epsilon < math.inf:
        return None
    queries = (q for r in rounds for q in r.queries)
    if any(isinstance(q, SumQuery) and q.rate < 1 for q in queries):
        at = approximate_dp(epsilon, delta, FPRS).tpr
        risk, curve = Risk(area(epsilon, delta), at), approximate_dp(epsilon, delta)
        return Limit(risk, curve, "approximate", epsilon, delta, None)
    sigma = sigma_for(epsilon, delta, claim.law)
    mu = 1 / sigma if sigma > 0 else math.inf
    return Limit(
        claimed(epsilon, delta, claim.law), closed_form(mu), "gaussian", epsilon, delta, mu
    )
