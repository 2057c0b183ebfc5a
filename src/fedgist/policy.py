"""What a site allows, whatever a task asks for: a TOML file of the site's own."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from fedgist.agreement import Agreement
from fedgist.config import Strict, read_strict
from fedgist.errors import DataError, PrivacyError
from fedgist.method import method_names
from fedgist.types import Images, Trust

__all__ = ["Policy"]


class Policy(Strict):
    """What a site allows, whatever a task asks for. The defaults are careful.

    Attributes:
        max_epsilon, max_delta: of one task.
        methods: names of methods that may run; empty for all that ship with FedGist.
        trust: who may be asked to add noise.
        raw: whether a method may read images without noise (its ε is infinite).
        seeded: whether noise may come from a seed. Simulations only.
        min_sites: the smallest federation to take part in.
        min_class: a class must have this many images at the site, or none.
        plain_sums: whether exact sums may go to the coordinator outside a secure sum.
        review: whether a person must look at every gist before it is sent (`fedgist inspect`).
    """

    max_epsilon: float = Field(default=10.0, gt=0)
    max_delta: float = Field(default=1e-5, gt=0, lt=1)
    methods: tuple[str, ...] = ()
    trust: tuple[Trust, ...] = ("local", "distributed")
    raw: bool = False
    seeded: bool = False
    min_sites: int = Field(default=1, ge=1)
    min_class: int = Field(default=0, ge=0)
    plain_sums: bool = False
    review: bool = False

    @staticmethod
    def load(path: Path | None) -> Policy:
        """Read a policy file, or return the defaults."""
        return Policy() if path is None else read_strict(path, Policy, "policy file")

    def check(self, agreement: Agreement) -> None:
        """Refuse a task that asks for more than the site allows.

        Raises:
            PrivacyError: what is asked for, what is allowed, and the policy's key.
        """
        claim, privacy = agreement.plan.claim, agreement.privacy
        allowed = self.methods or tuple(method_names())
        raw = any(r.raw for r in agreement.plan.rounds)
        plain = privacy.trust == "central" and not agreement.secure
        n = len(agreement.sites)
        for fine, key, limit, got in (
            (claim.epsilon <= self.max_epsilon, "max_epsilon", self.max_epsilon, claim.epsilon),
            (claim.delta <= self.max_delta, "max_delta", self.max_delta, claim.delta),
            (agreement.method["name"] in allowed, "methods", allowed, agreement.method["name"]),
            (privacy.trust in self.trust, "trust", self.trust, privacy.trust),
            (self.raw or not raw, "raw", self.raw, raw),
            (self.seeded or privacy.noise == "system", "seeded", self.seeded, privacy.noise),
            (n >= self.min_sites, "min_sites", self.min_sites, n),
            (self.plain_sums or not plain, "plain_sums", self.plain_sums, plain),
        ):
            if not fine:
                raise PrivacyError(
                    f"task '{agreement.task.name}' must keep to this site's policy, {key} = "
                    f"{limit}. Got {got}: refuse the task, or change the policy file"
                )

    def check_images(self, images: Images) -> None:
        """Refuse data with a class so small that its images stand out.

        Raises:
            DataError: names the class; for the site's eyes only.
        """
        for name, count in zip(images.classes, images.counts().tolist(), strict=True):
            if 0 < count < self.min_class:
                raise DataError(
                    f"class '{name}' must have at least {self.min_class} images, the policy's "
                    f"min_class, or none. Got {count}"
                )
