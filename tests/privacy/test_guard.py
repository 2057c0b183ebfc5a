"""The guard: what is not planned is refused, what is private cannot leave, bounds hold."""

import copy
import io
import math
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedgist
from fedgist.errors import DataError, PrivacyError, UnplannedQuery
from fedgist.privacy.client import Client, Contribution, Sensitive, open_sensitive
from fedgist.privacy.noise import SeededNoise, SystemNoise, noise_tensors
from fedgist.privacy.statistics import complete
from fedgist.queries import MomentsQuery, Query, SumQuery
from fedgist.types import Images, Round, Unit

CLASSES = ("a", "b", "c")
QUERY = MomentsQuery(1.5, 6, 3)
ROWS = SumQuery(2.0, levels=64)


def images_of(n: int, seed: int = 0, *, only: int | None = None, groups: bool = False) -> Images:
    rng = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 1, 4, 4), generator=rng, dtype=torch.uint8)
    labels = torch.randint(0, 3, (n,), generator=rng)
    if only is not None:
        labels[:] = only
    who = torch.randint(0, 5, (n,), generator=rng) if groups else None
    return Images(pixels, labels, CLASSES, who)


def encode(x: Tensor) -> Tensor:
    return x.flatten(1)[:, :6].to(torch.float64) - 0.5


def rows_of(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"pixels": x.flatten(1) - 0.5, "label": y.to(torch.float32)}


def client_of(images: Images, *queries: Query, sigma: float = 1.0, **options: object) -> Client:
    settings_: dict[str, object] = {"noise": SeededNoise(0), "max_images": 1000} | options
    raw = bool(settings_.pop("raw", False))
    return Client("site-7", images, Round("pool", queries, raw=raw), sigma=sigma, **settings_)  # type: ignore[arg-type]


def test_unplanned_queries_are_refused() -> None:
    client = client_of(images_of(9), QUERY)
    for other in (MomentsQuery(1.5, 6, 3, levels=64), MomentsQuery(1.6, 6, 3)):
        with pytest.raises(UnplannedQuery, match=r"^site-7: a query must be planned\. .*not in"):
            client.moments(encode, other)
    with pytest.raises(UnplannedQuery, match="not in the plan"):
        client.sum(rows_of, ROWS)
    client.moments(encode, QUERY)
    with pytest.raises(UnplannedQuery, match="asked 2 times"):
        client.moments(encode, QUERY)


def test_a_query_may_be_asked_as_often_as_planned() -> None:
    repeated = SumQuery(2.0, times=3)
    for plan in ((repeated,), (ROWS, ROWS, ROWS)):
        client = client_of(images_of(4), *plan)
        for _ in range(3):
            client.sum(rows_of, plan[0])
        with pytest.raises(UnplannedQuery):
            client.sum(rows_of, plan[0])


def test_images_stay_without_a_raw_plan() -> None:
    with pytest.raises(UnplannedQuery, match="site-7: images must stay unless the plan says raw"):
        client_of(images_of(4), QUERY).raw()
    assert len(client_of(images_of(4), raw=True).raw()) == 4


def test_exact_sums_cannot_be_copied_printed_or_turned_into_tensors() -> None:
    s = client_of(images_of(9), QUERY).moments(encode, QUERY)
    out: list[Callable[[], object]] = [
        lambda: pickle.dumps(s),
        lambda: copy.copy(s),
        lambda: copy.deepcopy(s),
        lambda: torch.save({"gist": s}, io.BytesIO()),
    ]
    for leave in out:
        with pytest.raises(PrivacyError, match="exact sums must not be copied out"):
            leave()
    for text in (repr(s), str(s), f"{s}"):
        assert not re.search(r"\d", text.replace("MomentsQuery", "")), text
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        torch.as_tensor(s)
    with pytest.raises(TypeError):
        vars(s)
    with pytest.raises(AttributeError):
        s.query = ROWS  # type: ignore[misc]
    with pytest.raises(AttributeError):
        s.extra = 1  # type: ignore[attr-defined]


def test_exact_sums_leave_once() -> None:
    """Fresh noise on the same sums, again and again, would average out under one budget."""
    client = client_of(images_of(9), QUERY)
    s = client.moments(encode, QUERY)
    client.release(s)
    for again in (lambda: client.release(s), lambda: open_sensitive(s)):
        with pytest.raises(PrivacyError, match="exact sums must leave once"):
            again()


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
def test_a_release_must_carry_noise(sigma: float) -> None:
    client = client_of(images_of(9), QUERY, sigma=sigma)
    with pytest.raises(PrivacyError, match="a release must carry noise"):
        client.release(client.moments(encode, QUERY))


def test_a_release_is_the_exact_sums_and_the_planned_noise() -> None:
    exact = complete(QUERY, open_sensitive(client_of(images_of(30), QUERY).moments(encode, QUERY)))
    client = client_of(images_of(30), QUERY, sigma=2.0, noise=SeededNoise(5))
    out = client.release(client.moments(encode, QUERY))
    drawn = noise_tensors(QUERY, 2.0, SeededNoise(5), exact)
    assert out.keys() == exact.keys() == {"count", "mean", "second", "pooled"}
    assert all(torch.equal(out[k], exact[k] + drawn[k]) for k in exact)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_refused(bad: float) -> None:
    def broken(x: Tensor) -> Tensor:
        z = encode(x)
        z[-1, 2] = bad
        return z

    def broken_rows(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"z": broken(x)}

    for ask in (
        lambda c: c.moments(broken, QUERY),
        lambda c: c.sum(broken_rows, ROWS),
    ):
        with pytest.raises(DataError, match=r"site-7: rows must be finite\. Got NaN or Inf"):
            ask(client_of(images_of(9), QUERY, ROWS))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: encode(x)[:, :5],
        lambda x: encode(x)[:-1],
        lambda x: torch.cat([encode(x), encode(x)]),
        lambda x: encode(x)[0],
        lambda x: encode(x)[:, :, None],
    ],
)
def test_codes_of_the_wrong_shape_are_refused(wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DataError, match=r"site-7: (codes|rows) must have .* Got"):
        client_of(images_of(9), QUERY).moments(wrong, QUERY)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, y: {"z": torch.cat([encode(x), encode(x)])},  # two rows of one image
        lambda x, y: {"z": encode(x).mean(0, keepdim=True)},
        lambda x, y: {"z": encode(x)[:, : len(x)]},
        lambda x, y: {"z": encode(x)} | ({"w": encode(x)} if len(x) > 1 else {}),
    ],
)
def test_rows_must_be_one_per_image_and_always_alike(wrong: Callable[..., object]) -> None:
    with pytest.raises(DataError, match="site-7: rows must be one per image"):
        client_of(images_of(9), ROWS).sum(wrong, ROWS)  # type: ignore[arg-type]


def test_a_client_above_the_public_bound_is_refused() -> None:
    client_of(images_of(20), QUERY, max_images=20)
    with pytest.raises(DataError, match=r"site-7 must hold at most 20 images\. Got 21"):
        client_of(images_of(21), QUERY, max_images=20)
    with pytest.raises(DataError):  # before any contribution bound could hide it
        client_of(images_of(21), QUERY, max_images=20, contribution=Contribution("client", 5))


@pytest.mark.parametrize(
    "images",
    [images_of(0), images_of(1), images_of(40, only=2), images_of(600)],
    ids=["empty", "one image", "one class", "many"],
)
@pytest.mark.parametrize(
    "query",
    [
        QUERY,
        MomentsQuery(1.5, 6, 3, 0.5, 0.48, 0.0, 0.02),
        MomentsQuery(1.5, 6, 3, 0.7, 0.0, 0.28, 0.02),
        MomentsQuery(1.5, 6, 3, 0.5, 0.5, 0.0, 0.0, exact_counts=True),
    ],
)
def test_shapes_never_depend_on_the_data(images: Images, query: MomentsQuery) -> None:
    exact = open_sensitive(client_of(images, query).moments(encode, query))
    assert {k: tuple(v.shape) for k, v in exact.items()} == query.shapes(noised=False)
    client = client_of(images, query)
    out = client.release(client.moments(encode, query))
    assert {k: tuple(v.shape) for k, v in out.items()} == query.shapes(noised=True)
    assert int(exact["count"].sum()) == len(images)
    for per_class, lead in ((False, ()), (True, (3,))):
        rows = SumQuery(2.0, per_class=per_class)
        total = open_sensitive(client_of(images, rows).sum(rows_of, rows))
        assert {k: tuple(v.shape) for k, v in total.items()} == {
            "pixels": (*lead, 16),
            "label": lead,
        }


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**31), st.integers(0, 300), st.integers(1, 6))
def test_sums_do_not_depend_on_who_holds_what(seed: int, n: int, clients: int) -> None:
    images = images_of(n, seed)
    owner = torch.randint(0, clients, (n,), generator=torch.Generator().manual_seed(seed))
    rows = SumQuery(0.7, per_class=True)

    def sums(part: Images) -> dict[str, Tensor]:
        client = client_of(part, QUERY, rows)
        return open_sensitive(client.moments(encode, QUERY)) | open_sensitive(
            client.sum(rows_of, rows)
        )

    whole = sums(images)
    parts = [sums(images.take(torch.nonzero(owner == i).flatten().flip(0))) for i in range(clients)]
    for name, value in whole.items():
        assert torch.equal(value, torch.stack([p[name] for p in parts]).sum(0))


def test_a_record_moves_a_sum_by_its_clipped_row_in_its_own_class() -> None:
    query = SumQuery(0.5, levels=512, per_class=True)
    images = images_of(50)
    for i in (0, 17):
        rest = torch.arange(50) != i
        with_it = open_sensitive(client_of(images, query).sum(rows_of, query))
        without = open_sensitive(client_of(images.take(rest), query).sum(rows_of, query))
        square = torch.stack(
            [((with_it[k] - without[k]) ** 2).reshape(3, -1).sum(1) for k in with_it]
        ).sum(0)
        own = int(images.labels[i])
        assert 0 < int(square[own]) <= 512**2
        assert [int(s) for c, s in enumerate(square) if c != own] == [0, 0]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(0, 60), st.integers(1, 7))
def test_a_person_gives_at_most_k_images(seed: int, n: int, k: int) -> None:
    images = images_of(n, seed, groups=True)
    kept, note = Contribution("person", k).keep(images, seed)
    assert note is None and images.groups is not None and kept.groups is not None
    held, used = (
        torch.bincount(images.groups, minlength=5),
        torch.bincount(kept.groups, minlength=5),
    )
    assert torch.equal(used, held.clamp(max=k))
    for person in range(5):  # whoever else is there, the same images of this person are used
        alone = images.take(images.groups == person)
        chosen, _ = Contribution("person", k).keep(alone, seed + 1)
        assert torch.equal(chosen.pixels, kept.pixels[kept.groups == person])


def test_a_person_who_leaves_takes_at_most_k_records_along() -> None:
    images = images_of(60, groups=True)
    assert images.groups is not None
    bound = Contribution("person", 3)
    without = images.take(images.groups != 2)
    counts = [
        open_sensitive(client_of(x, QUERY, contribution=bound).moments(encode, QUERY))["count"]
        for x in (images, without)
    ]
    gap = counts[0] - counts[1]
    assert bool((gap >= 0).all()) and int(gap.sum()) == 3


def test_people_without_names_are_noted() -> None:
    client = client_of(images_of(9), contribution=Contribution("person", 2))
    assert client.used == 9 and client.note is not None and "site's word" in client.note
    assert client_of(images_of(9, groups=True), contribution=Contribution("person", 2)).note is None


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40), st.integers(1, 45), st.integers(0, 2**31))
def test_a_client_gives_at_most_k_images(n: int, k: int, seed: int) -> None:
    images = images_of(n, seed)
    kept, note = Contribution("client", k).keep(images, seed)
    assert len(kept) == min(n, k) and note is None
    again, _ = Contribution("client", k).keep(images, seed)
    assert torch.equal(again.pixels, kept.pixels) and torch.equal(again.labels, kept.labels)
    whole, _ = Contribution("image", 1).keep(images, seed)
    assert whole is images


@pytest.mark.parametrize("unit", ["image", "person", "client"])
def test_inputs_and_global_generators_are_untouched(unit: Unit) -> None:
    images = images_of(70, groups=True)
    before = [t.clone() for t in (images.pixels, images.labels, images.groups)]  # type: ignore[union-attr]
    SystemNoise().sample(1.0, 1)  # the library behind it draws random numbers when it is imported
    states = torch.get_rng_state(), np.random.get_state(legacy=True)[1].copy(), random.getstate()
    for noise in (SeededNoise(0), SystemNoise()):
        client = client_of(
            images, QUERY, ROWS, noise=noise, contribution=Contribution(unit, 1 + (unit != "image"))
        )
        client.release(client.moments(encode, QUERY))
        client.release(client.sum(rows_of, ROWS))
    after = (images.pixels, images.labels, images.groups)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state(legacy=True)[1] == states[1]).all() and random.getstate() == states[
        2
    ]


def test_a_client_shows_methods_nothing_of_its_data() -> None:
    client = client_of(images_of(9), QUERY)
    assert client.classes == CLASSES
    public = {name for name in dir(client) if not name.startswith("_")}
    assert public == {
        "classes",
        "memory",
        "moments",
        "name",
        "note",
        "raw",
        "release",
        "row",
        "sigma",
        "sum",
        "used",
    }
    assert {name for name in dir(Sensitive) if not name.startswith("_")} == {"query"}


def test_nobody_reaches_around_the_guard() -> None:
    root = Path(fedgist.__file__).parent
    inside = {"privacy", "exchange"}
    audits = root / "audit" / "worlds.py"  # exact sums of canaries of its own: no client's images
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] not in inside and path != audits:
            found = re.search(r"\bopen_sensitive\b|\._images\b|_Sensitive__", path.read_text())
            assert not found, f"{path.relative_to(root)} uses {found and found.group()}"
    for path in (root / "exchange").rglob("*.py"):
        assert not re.search(r"\._images\b|_Sensitive__", path.read_text())
