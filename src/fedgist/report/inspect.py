"""What a gist tells before it is sent: what leaves, what stands behind it, what can be done.

The gist waits under review (`exchange.review`) or lies in a file (`exchange.handed`). Read by the
person who answers for the data, on the site's own machine. Nothing here leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from fedgist.agreement import Agreement
from fedgist.audit.similarity import Distance, Perceptual
from fedgist.errors import ConfigError, DataError, PrivacyError, ProtocolError, did_you_mean
from fedgist.exchange.handed import Handed
from fedgist.exchange.receipt import (
    Desk,
    Pending,
    Receipt,
    Verdict,
    WithheldImages,
    data_hash,
    image_hashes,
    round_of,
)
from fedgist.method import Exposing
from fedgist.policy import Policy
from fedgist.privacy.identity import Identity
from fedgist.privacy.ledger import Ledger
from fedgist.report.examine import (
    FIXED,
    Examined,
    asked_of,
    evidence_of,
    ledger_of,
    origins_of,
    pictures_of,
    rules_of,
)
from fedgist.report.pairs import Pairs
from fedgist.report.record import versions
from fedgist.run import derive
from fedgist.types import Images, Round, Tensors

__all__ = ["Inspection", "Subject", "names_of"]

CLOSEST = 12  # images most like their uploads, of all classes
FIRST = 5  # images of each class that are shown beside their uploads


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        record: plain values, for JSON; see `Subject.inspect`.
        gist: the tensors that wait, as they would be sent; empty when nothing waits.
        rows: int64 ``[n]``, which of the site's images each row of an upload was made of, from 0;
            None where the gist has no row for each image or they cannot be told.
        decoded: images made from the site's own sums as they would leave, or None.
    """

    record: dict[str, Any]
    gist: Tensors
    rows: Tensor | None
    decoded: Images | None = None


@dataclass(frozen=True)
class Subject:
    """All that an inspection looks at.

    Attributes:
        agreement: the site's own copy of the task.
        identity: its keys; None where nothing is to be decided.
        review: what waits and what was decided.
        images: the site's own, all of them; the number of an image is its place here, from 1. None
            where they are not at hand: a gist file can be looked at without them.
        names: of their files, where they have any; else empty.
        left: what the plan says of every block (`fedgist.setup.blocks`).
        command: that shows this, for the page.
        policy: what the site allows; None for the careful defaults.
        ledger: what its data have spent; None where it is not to be read.
    """

    agreement: Agreement
    identity: Identity | None
    review: Desk
    images: Images | None
    names: Sequence[str]
    left: Sequence[dict[str, Any]]
    command: str
    policy: Policy | None = None
    ledger: Ledger | None = None

    def decide(
        self,
        verdict: Verdict,
        classes: Sequence[str] = (),
        numbers: Sequence[int] = (),
        gist: str = "",
        asked: float | None = None,
    ) -> Receipt:
        """Decide about what waits, or about what was sent last (where no other decision counts).

        Args:
            verdict: send or refuse.
            classes: names of classes to withhold.
            numbers: of images to withhold.
            gist: the first digits of the SHA-256 of the gist that was looked at; empty for any.
            asked: with a refusal, the ε at which the site would take part.

        Raises:
            ConfigError: no such class or image; all images would be withheld.
            DataError: the images are not those that the gist was made of.
            PrivacyError: it is to be sent, and breaks a rule: one of the policy, where one was
                named, else one of those that no policy switches off.
            ProtocolError: nothing waits, another gist does, or it was sent.
        """
        if self.identity is None:
            raise ConfigError("a decision must be signed. Got no --key: name this site's NAME.key")
        waiting = self._waiting()
        done = self.review.receipts()
        if waiting is None and not done:
            raise ProtocolError(
                "a decision must be about a gist that waits. Got none: start `fedgist join` or "
                "`fedgist contribute` with --review first"
            )
        step = waiting.step if waiting else str(done[-1].said["step"])
        digest = waiting.digest if waiting else str(done[-1].said["gist"])
        if not digest.startswith(gist.lower()):
            raise ProtocolError(
                f"a decision must be about the gist that waits, {digest[:12]}. Got one about "
                f"{gist[:12]}: look at it again, then decide"
            )
        withheld = self._named(classes, numbers) if classes or numbers else None
        if verdict == "send" and waiting is not None:
            self._refuse_broken(waiting)
        return self.review.decide(self.identity, step, digest, verdict, withheld, asked)

    def inspect(self, distance: Distance | None = None) -> Inspection:
        """Look at what waits.

        Args:
            distance: for pairs of images; None for `Perceptual`.

        Returns:
            Its record has ``task``, ``hash``, ``site``, ``method``, ``claim``, ``command``,
            ``decisions`` (a list of receipts) and ``waiting``: None, or a dictionary with ``step``,
            ``round``, ``rounds``, ``made``, ``gist``, ``bytes``, ``kind`` (``uploads``,
            ``pictures`` or ``numbers``), ``raw``, ``secure``, ``pieces``, ``held``, ``used``,
            ``withheld``, ``decision``; for uploads ``distance``, ``classes`` and ``closest``; and
            ``rules`` (each with ``rule``, ``limit``, ``got``, ``kept``), ``asked``
            (`examine.asked_of`), ``encoders``, ``ledger``, ``evidence`` and ``versions``.

        Raises:
            DataError: the images are not those that the gist was made of.
            ProtocolError: a file of the review was changed.
        """
        a, waiting = self.agreement, self._waiting()
        record: dict[str, Any] = {
            "task": a.task.name,
            "hash": a.digest,
            "site": self.review.public.name,
            "method": str(a.method["name"]),
            "claim": a.plan.claim.record(),
            "deadline": a.model_dump(mode="json")["exchange"]["deadline"],
            "patience": a.exchange.patience,
            "sites": len(a.sites),
            "missing": a.privacy.missing,
            "command": self.command,
            "policy": self.policy is not None,
            "decisions": [_shown(r) for r in self.review.receipts()],
            "waiting": None,
        }
        if waiting is None:
            return Inspection(record, {}, None)
        seen = self._examined(waiting)
        gist = seen.gist
        found = self._facts(waiting, seen.round, gist) | {
            "file": str(self.review.path) if isinstance(self.review, Handed) else None,
            "held": None if self.images is None else len(self.images),
            "used": None if seen.used is None else len(seen.used),
            "withheld": {
                "classes": list(waiting.withheld.classes),
                "images": len(waiting.withheld.images),
            },
        }
        found |= self._behind(seen)
        rows = self._rows(waiting, gist) if found["kind"] == "uploads" else None
        if rows is not None:
            found |= self._alike(gist["pixels"], rows, distance or Perceptual())
        return Inspection(record | {"waiting": found}, gist, rows, pictures_of(seen))

    def _refuse_broken(self, waiting: Pending) -> None:
        rules = self._behind(self._examined(waiting))["rules"]
        for rule in rules:
            if not rule["kept"] and (self.policy is not None or rule["rule"] in FIXED):
                raise PrivacyError(
                    f"a gist must keep this site's rules to be sent. Got '{rule['rule']}': "
                    f"{rule['got']}, allowed: {rule['limit']}"
                )

    def _examined(self, waiting: Pending) -> Examined:
        a, public = self.agreement, self.review.public
        left = None if self.images is None else waiting.withheld.left(self.images)
        r, gist = round_of(waiting.step), load(waiting.gist)
        return Examined(a, r, gist, a.place(public), public.name, self.images, left)

    def _behind(self, seen: Examined) -> dict[str, Any]:
        """Return what stands behind the gist: see `examine`."""
        rounds = range(len(self.agreement.plan.rounds))
        ledger = ledger_of(seen, self.ledger, rounds if seen.r == 0 else [seen.r])
        evidence = evidence_of(seen)
        stated = self.review.broken if isinstance(self.review, Handed) else ()
        policy = self.policy or Policy()
        rules = rules_of(seen, policy, stated, ledger, evidence["noise"])
        return {
            "rules": [rule.record() for rule in rules],
            "asked": asked_of(seen.round),
            "encoders": origins_of(self.agreement),
            "ledger": ledger,
            "evidence": evidence,
            "versions": versions(),
        }

    def _waiting(self) -> Pending | None:
        waiting = self.review.waiting()
        if waiting is None or self.images is None or not waiting.data:
            return waiting
        if waiting.data != data_hash(self.images):
            raise DataError(
                "--data must be the images that the waiting gist was made of, in the same order. "
                f"Got {len(self.images)} others: name the same data as `fedgist join` does, or let "
                "it make the gist anew"
            )
        return waiting

    def _named(self, classes: Sequence[str], numbers: Sequence[int]) -> WithheldImages:
        if self.images is None:
            raise ConfigError("what to withhold must be named with --data. Got no images")
        known = self.images.classes
        for name in classes:
            if name not in known:
                raise ConfigError(
                    f"a class to withhold must be one of {list(known)}. Got '{name}'."
                    + did_you_mean(name, known)
                )
        for n in numbers:
            if not 1 <= n <= len(self.images):
                raise ConfigError(
                    f"the number of an image must lie in 1..{len(self.images)}, as shown on the "
                    f"page. Got {n}"
                )
        taken = self.images.take(torch.tensor([n - 1 for n in numbers], dtype=torch.int64))
        out = WithheldImages(tuple(sorted({*classes})), tuple(sorted({*image_hashes(taken)})))
        if out and not bool(out.kept(self.images).any()):
            raise ConfigError("an image must be left to send. Got none: use --refuse")
        return out

    def _facts(self, waiting: Pending, rnd: Round, gist: Tensors) -> dict[str, Any]:
        """Return what can be said of any gist."""
        receipt = self.review.receipt(waiting.step)
        about = receipt is not None and receipt.said["gist"] == waiting.digest
        r = round_of(waiting.step)
        rows = {_name(b): b for b in self.left if b["round"] == r + 1}
        return {
            "step": waiting.step,
            "round": r + 1,
            "rounds": len(self.agreement.plan.rounds),
            "made": waiting.made,
            "gist": waiting.digest,
            "bytes": len(waiting.gist),
            "kind": _kind(rnd, gist),
            "raw": rnd.raw or math.isinf(self.agreement.plan.claim.epsilon),
            "secure": rnd.noised and self.agreement.secure,
            "pieces": [_piece(k, v, rows.get(k), rnd.noised) for k, v in sorted(gist.items())],
            "decision": _shown(receipt) if about and receipt else None,
        }

    def _rows(self, waiting: Pending, gist: Tensors) -> Tensor | None:
        """Return which image each row was made of: the guard's choice, then the method's."""
        a, images = self.agreement, self.images
        if images is None:
            return None
        n = len(images)
        every = torch.arange(n).to(torch.float32).reshape(n, 1, 1, 1)  # exact below 2^24
        marked = replace(images, pixels=every).take(waiting.withheld.kept(images))
        place = a.place(self.review.public)
        marked, _ = a.privacy.contribution.keep(marked, derive(a.seed, "keep", place))
        used = marked.pixels.flatten().to(torch.int64)
        sent = replace(images.take(used), groups=used)
        labels = gist["labels"].to(torch.int64)
        rows = (a.built.used(sent) if isinstance(a.built, Exposing) else sent).groups
        fits = rows is not None and torch.equal(images.labels[rows], labels)
        return rows if fits and gist["pixels"].shape[1] == images.pixels.shape[1] else None

    def _alike(self, pixels: Tensor, rows: Tensor, distance: Distance) -> dict[str, Any]:
        """Compare every upload with its image; say which are most alike."""
        images = self._own
        pairs = Pairs(images, pixels, rows)
        labels, classes = images.labels[rows], []
        for c, name in enumerate(images.classes):
            mine = (labels == c).nonzero().flatten()
            held = int((images.labels == c).sum())
            row: dict[str, Any] = {"name": name, "held": held, "sent": len(mine)}
            row |= {"ssim": None, "worst": None, "first": []}
            if len(mine):
                row["ssim"] = float(pairs.ssim[mine].median())
                worst = mine[pairs.ssim[mine].argmax()].reshape(1)
                row["worst"] = self._described(pairs, worst, distance)[0]
                row["first"] = self._described(pairs, mine[:FIRST], distance)
            classes.append(row)
        order = torch.argsort(pairs.ssim, descending=True, stable=True)[:CLOSEST]
        return {
            "distance": distance.name,
            "ssim": float(pairs.ssim.median()) if len(rows) else None,
            "classes": classes,
            "closest": self._described(pairs, order, distance),
        }

    def _described(self, pairs: Pairs, which: Tensor, distance: Distance) -> list[dict[str, Any]]:
        with torch.no_grad():
            far = distance(*pairs.take(which)).tolist() if len(which) else []
        out = []
        for i, d in zip(which.tolist(), far, strict=True):
            at = int(pairs.rows[i])
            figures = {"psnr": float(pairs.psnr[i]), "ssim": float(pairs.ssim[i]), "distance": d}
            named = {"number": at + 1, "file": self.names[at] if self.names else None}
            out.append({"row": i, **named, "class": self._class(at), **figures})
        return out

    def _class(self, at: int) -> str:
        return self._own.classes[int(self._own.labels[at])]

    @property
    def _own(self) -> Images:
        """The site's images, where they must be there."""
        if self.images is None:
            raise ConfigError("--data must name this site's images. Got none")
        return self.images


def names_of(records: Any) -> list[str]:
    """Return the names of files, where records are files; else nothing."""
    names = [getattr(p, "name", None) for p in records] if isinstance(records, Sequence) else []
    return [str(n) for n in names] if all(names) else []


def _shown(receipt: Receipt) -> dict[str, Any]:
    return dict(receipt.said) | {"sent": dict(receipt.sent) if receipt.sent else None}


def _name(block: dict[str, Any]) -> str:
    return f"{block['view']}.{block['block']}" if block["view"] else str(block["block"])


def _kind(rnd: Round, gist: Tensors) -> str:
    """Tell uploads of images from synthetic pictures and from mere numbers."""
    pixels = next((p for p in rnd.sends if p.name == "pixels" and len(p.shape) == 4), None)
    if pixels is None or pixels.shape[1] not in (1, 3):
        return "numbers"
    return "uploads" if pixels.by_image and "labels" in gist else "pictures"


def _piece(name: str, value: Tensor, row: dict[str, Any] | None, noised: bool) -> dict[str, Any]:
    """Return what one tensor of a gist is; of sums in the shape they had before packing."""
    packed = noised and row is not None
    return {
        "name": name,
        "shape": list(row["shape"]) if row and packed else list(value.shape),
        "type": f"integers of {row['bits']} bits" if row and packed else _type(value),
        "bytes": row["bytes"] if row and packed else value.numel() * value.element_size(),
        "noise": row["noise"] if row else None,
    }


def _type(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
