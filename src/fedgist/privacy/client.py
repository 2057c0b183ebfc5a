"""The guard: the only way in which a method meets a client's images.

A method declares its queries before it sees an image. `Client` answers those and no others, and
what it answers is `Sensitive`: exact integers that cannot be printed, pickled or turned into
tensors. They leave only with noise (`Client.release`), or inside a sum round whose exchange adds
the noise that the trust model asks for. It is a guard rail, not a sandbox.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

import torch
from torch import Tensor

from fedgist.errors import DataError, PrivacyError, UnplannedQuery
from fedgist.privacy.noise import Noise, noise_tensors
from fedgist.privacy.statistics import BLOCK, MomentSums, clip_to_grid, complete
from fedgist.queries import MomentsQuery, Query, SumQuery
from fedgist.types import BATCH, Images, Round, Tensors, Unit

__all__ = ["Client", "Contribution", "Sensitive", "open_sensitive"]


@dataclass(frozen=True)
class Contribution:
    """How much of a data set one unit of privacy may hold: the bound behind the sensitivity.

    Attributes:
        unit: ``image``, ``person`` (the images that share a group) or ``client``.
        records: at most this many images of one unit are used; the rest are left out.
    """

    unit: Unit = "image"
    records: int = 1

    def keep(self, images: Images, seed: int) -> tuple[Images, str | None]:
        """Return the images that may be used and a note about what could not be enforced.

        Which images of a unit are kept depends on that unit's images alone, so that neighbours
        differ in at most ``records`` records.
        """
        if self.unit == "image":
            return images, None
        if self.unit == "client":
            if len(images) <= self.records:
                return images, None
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
            return images.take(order[: self.records].sort().values), None
        if images.groups is None:
            return images, (
                f"the data name no person: that nobody has more than {self.records} images is "
                "the site's word"
            )
        seen: Counter[int] = Counter()
        rows = []
        for i, person in enumerate(images.groups.tolist()):
            seen[person] += 1
            if seen[person] <= self.records:
                rows.append(i)
        return images.take(torch.tensor(rows, dtype=torch.int64)), None


class Sensitive:
    """Exact sums over a client's records. Cannot leave as they are."""

    __slots__ = ("__query", "__tensors")

    def __init__(self, query: Query, tensors: Tensors) -> None:
        self.__query = query
        self.__tensors: Tensors | None = tensors

    @property
    def query(self) -> Query:
        """What was asked: it decides the noise."""
        return self.__query

    def __repr__(self) -> str:
        return f"Sensitive({type(self.query).__name__}: release() it, or return it in a sum round)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("exact sums must not be copied out. Got a request to pickle them")


def open_sensitive(s: Sensitive) -> Tensors:
    """Return the exact sums, once. For exchanges, which add the noise; methods must not call this.

    Raises:
        PrivacyError: they were taken before. Two noisy answers to one query would average the
            noise away, and the plan pays for one.
    """
    tensors: Tensors | None = s._Sensitive__tensors  # type: ignore[attr-defined]
    if tensors is None:
        raise PrivacyError(
            f"exact sums must leave once. Got a second request for {s!r}: plan the query twice"
        )
    s._Sensitive__tensors = None  # type: ignore[attr-defined]
    return tensors


class Client:
    """One data holder in one round, as a method sees it.

    Args:
        name: for messages.
        images: the private images.
        rnd: the round's declaration, from the client's own copy of the plan.
        sigma: the calibrated noise multiplier.
        noise: where `release` takes noise from.
        contribution: how many records of one unit may be used.
        max_images: the task's public bound.
        memory: tensors that survive rounds and never leave.
        seed: decides which images a bounded unit keeps.
        exact: the claim is ε = inf and says so: `release` adds nothing.
    """

    def __init__(
        self,
        name: str,
        images: Images,
        rnd: Round,
        *,
        sigma: float,
        noise: Noise,
        contribution: Contribution | None = None,
        max_images: int,
        memory: Tensors | None = None,
        seed: int = 0,
        exact: bool = False,
    ) -> None:
        if len(images) > max_images:
            raise DataError(
                f"{name} must hold at most {max_images} images. Got {len(images)}: raise "
                "task.max_images, for all sites alike"
            )
        self.name = name
        self.memory: Tensors = {} if memory is None else memory
        self.note: str | None
        self._images, self.note = (contribution or Contribution()).keep(images, seed)
        self._round = rnd
        self._sigma = sigma
        self._noise = noise
        self._exact = exact
        self._left: Counter[Query] = Counter()
        for q in rnd.queries:
            self._left[q] += q.times

    @property
    def classes(self) -> tuple[str, ...]:
        """The task's classes, whatever this client holds."""
        return self._images.classes

    @property
    def used(self) -> int:
        """How many images are used. Private: for the site's own records, never for a gist."""
        return len(self._images)

    def moments(self, encode: Callable[[Tensor], Tensor], query: MomentsQuery) -> Sensitive:
        """Sum codes and their outer products per class, in one pass.

        Args:
            encode: maps float32 ``[b, c, h, w]`` (b <= 250) to float64 ``[b, query.dim]``, row by
                row.
            query: must be in the round's plan.
        """
        self._spend(query)
        sums = MomentSums(query)
        # Images go through the encoder in batches that fit the cache; codes are clipped and summed
        # in blocks of several, since each of those operations is small.
        pairs = ((self._codes(encode, x, query.dim), y) for x, y in self._images.batches())
        while block := list(islice(pairs, BLOCK // BATCH)):
            z, labels = (torch.cat(parts) for parts in zip(*block, strict=True))
            sums.add(clip_to_grid(z, query.clip, query.levels), labels)
        return Sensitive(query, sums.tensors())

    @property
    def sigma(self) -> float:
        """The multiplier of the noise that `release` adds: public, from the plan."""
        return self._sigma

    def sum(
        self, rows_of: Callable[[Tensor, Tensor], Mapping[str, Tensor]], query: SumQuery
    ) -> Sensitive:
        """Sum per-record rows after clipping all their tensors jointly.

        Args:
            rows_of: maps (float32 ``[b, c, h, w]``, int64 ``[b]``) to tensors ``[b, ...]``.
            query: must be in the round's plan. With ``per_class`` the sums are
                ``[classes, ...]``, a record entering the block of its own class. With ``rates`` a
                fresh Poisson sample of the records is taken; it may be empty.
        """
        self._spend(query)
        images = self._sampled(query)
        totals: dict[str, Tensor] = {}
        blank = torch.zeros(1, *self._images.pixels.shape[1:])
        probe = rows_of(blank, torch.zeros(1, dtype=torch.int64))
        shapes = {k: v.shape[1:] for k, v in probe.items()}
        blocks = len(self.classes) if query.per_class else 1
        for name, shape in shapes.items():
            totals[name] = torch.zeros(blocks, shape.numel(), dtype=torch.float64)
        for x, y in images.batches():
            parts = rows_of(x, y)
            got = {k: list(v.shape) for k, v in parts.items()}
            if got != {k: [len(x), *shape] for k, shape in shapes.items()}:
                raise DataError(
                    f"{self.name}: rows must be one per image, of the same names and shapes in "
                    f"every batch. Got {got} for {len(x)} images"
                )
            flat = {k: self._rows(v.reshape(len(x), -1), len(x)) for k, v in parts.items()}
            joint = clip_to_grid(torch.cat(list(flat.values()), dim=1), query.clip, query.levels)
            block = y if query.per_class else torch.zeros_like(y)
            pieces = torch.split(joint, [v.shape[1] for v in flat.values()], dim=1)
            for name, piece in zip(flat, pieces, strict=True):
                totals[name].index_add_(0, block, piece)
        lead = (blocks,) if query.per_class else ()
        out = {k: v.to(torch.int64).reshape((*lead, *shapes[k])) for k, v in totals.items()}
        return self._answered(query, out)

    def row(self, make: Callable[[Images], Tensor], query: SumQuery) -> Sensitive:
        """Clip one row made from all images of this client: what one client adds to a sum.

        Args:
            make: maps the images to a float tensor of the query's shape; not called when there are
                none, as an empty client adds zeros.
            query: must be in the round's plan, with ``whole`` and a shape.
        """
        self._spend(query)
        if not query.whole:
            raise UnplannedQuery(f"{self.name}: a row must be planned with whole. Got {query}")
        row = make(self._images) if len(self._images) else torch.zeros(query.shape)
        flat = clip_to_grid(self._rows(row.reshape(1, -1), 1), query.clip, query.levels)
        return self._answered(query, {"rows": flat.to(torch.int64).reshape(row.shape)})

    def _sampled(self, query: SumQuery) -> Images:
        if set(query.rates) <= {1.0}:
            return self._images
        if len(query.rates) not in (1, len(self.classes)):
            raise DataError(
                f"{self.name}: rates must be one, or one for each of {len(self.classes)} classes. "
                f"Got {len(query.rates)}"
            )
        rates = torch.tensor(query.rates, dtype=torch.float64)
        each = rates.expand(len(self.classes)) if len(rates) == 1 else rates
        return self._images.take(self._noise.chosen(each[self._images.labels]))

    def _answered(self, query: SumQuery, out: Tensors) -> Sensitive:
        if query.shape and {k: tuple(v.shape) for k, v in out.items()} != {"rows": query.shape}:
            raise DataError(
                f"{self.name}: sums must be the plan's 'rows' {list(query.shape)}. "
                f"Got { ({k: list(v.shape) for k, v in out.items()}) }"
            )
        return Sensitive(query, out)

    def release(self, s: Sensitive) -> Tensors:
        """Add all of the noise here. The result (int64, grid units) may be used or may leave."""
        if self._exact and self._sigma == 0:
            return open_sensitive(s)
        if not self._sigma > 0:
            raise PrivacyError("a release must carry noise. Got sigma = 0: the plan is not private")
        exact = open_sensitive(s)
        if isinstance(s.query, MomentsQuery):
            exact = complete(s.query, exact)
        drawn = noise_tensors(s.query, self._sigma, self._noise, exact)
        return {k: v + drawn[k] for k, v in exact.items()}

    def raw(self) -> Images:
        """Return the images themselves, if the plan says so (its ε is then infinite)."""
        if not self._round.raw:
            raise UnplannedQuery(
                f"{self.name}: images must stay unless the plan says raw. Got a plan without it"
            )
        return self._images

    def _spend(self, query: Query) -> None:
        if self._left[query] <= 0:
            planned = query in self._round.queries
            what = f"asked {query.times + 1} times" if planned else "not in the plan"
            raise UnplannedQuery(f"{self.name}: a query must be planned. Got {query} ({what})")
        self._left[query] -= 1

    def _codes(self, encode: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
        z = self._rows(encode(x), len(x))
        if z.shape[1] != dim:
            raise DataError(f"{self.name}: codes must have {dim} numbers. Got {z.shape[1]}")
        return z

    def _rows(self, z: Tensor, n: int) -> Tensor:
        z = z.to(torch.float64)
        if z.ndim != 2 or len(z) != n:
            raise DataError(f"{self.name}: rows must have shape [{n}, d]. Got {list(z.shape)}")
        # A sum sees NaN and Inf at a tenth of the price of looking at every number.
        if not math.isfinite(float(z.sum())) and not bool(torch.isfinite(z).all()):
            raise DataError(f"{self.name}: rows must be finite. Got NaN or Inf from the encoder")
        return z
