"""What a holder finds in its own gist: too little noise, other images, small classes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedgist.audit.evidence import (
    clip_and_exposure,
    faint_classes,
    level_of,
    noise_in,
    share_of,
    without_noise,
)
from fedgist.exchange.gist import Duty, answer
from fedgist.methods.fedkt_csd import FedKTCSD
from fedgist.privacy.claim import Privacy
from fedgist.queries import MomentsQuery
from fedgist.run import plan_of
from fedgist.types import Images, Task

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images():
    rng = torch.Generator().manual_seed(0)
    pixels = (torch.rand(60, 1, 16, 16, generator=rng) * 255).to(torch.uint8)
    return Images(pixels, torch.arange(60) % 3, ("a", "b", "c"))


def duty_of(images, parties=3, **terms):
    task = Task("toy", images.classes, channels=1, size=16, max_images=200)
    method = FedKTCSD(features="", heads=("qda",))
    privacy = Privacy(**{"epsilon": 5.0, "trust": "local"} | terms)
    plan = plan_of(method, task, privacy)
    return Duty(method, task, privacy, plan.sigma, parties, seed=4), plan.rounds[0]


def gist_of(duty, rnd, images, **change):
    return answer(replace(duty, **change), 0, "a site", lambda: images, 0, rnd, {}, {}).gist


def exact_of(duty, rnd, images):
    plain = replace(duty.privacy, trust="central", missing=0)
    return gist_of(duty, rnd, images, privacy=plain)


@pytest.mark.parametrize("terms", [{"trust": "local"}, {"trust": "distributed", "missing": 1}])
def test_noise_as_planned_is_found_so(images, terms):
    duty, rnd = duty_of(images, **terms)
    found = noise_in(duty, rnd, gist_of(duty, rnd, images), exact_of(duty, rnd, images))
    assert set(found) == {"count", "mean", "second", "pooled"}
    assert {block["state"] for block in found.values()} == {"as planned"}
    assert found["second"]["ratio"] == pytest.approx(1, abs=0.03)
    assert found["second"]["numbers"] == 3 * 128 * 129 // 2


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_too_little_noise_is_flagged(images, share):
    duty, rnd = duty_of(images)
    thin = gist_of(duty, rnd, images, sigma=share * duty.sigma)
    found = noise_in(duty, rnd, thin, exact_of(duty, rnd, images))
    assert found["second"]["state"] == found["pooled"]["state"] == "small"
    assert found["second"]["ratio"] == pytest.approx(share, abs=0.03)


def test_one_block_without_noise_is_flagged(images):
    duty, rnd = duty_of(images)
    exact = exact_of(duty, rnd, images)
    bare = gist_of(duty, rnd, images) | {"mean": exact["mean"]}
    found = noise_in(duty, rnd, bare, exact)
    assert found["mean"]["state"] == "small" and found["second"]["state"] == "as planned"


def test_a_share_that_stands_for_all_of_the_noise_is_flagged(images):
    """Under local trust, a site that adds one share of three has too little."""
    duty, rnd = duty_of(images)
    shares = replace(duty.privacy, trust="distributed")
    thin = gist_of(duty, rnd, images, privacy=shares)
    found = noise_in(duty, rnd, thin, exact_of(duty, rnd, images))
    assert found["second"]["state"] == "small"
    assert found["second"]["ratio"] == pytest.approx(math.sqrt(1 / 3), abs=0.03)


def test_other_images_are_told_from_too_little_noise(images):
    duty, rnd = duty_of(images, epsilon=200.0)
    gist = gist_of(duty, rnd, images.take(torch.arange(30)))
    found = noise_in(duty, rnd, gist, exact_of(duty, rnd, images))
    assert "other images" in {block["state"] for block in found.values()}
    assert "small" not in {block["state"] for block in found.values()}


def test_central_gists_carry_none_and_are_completed(images):
    duty, rnd = duty_of(images, trust="central")
    gist = gist_of(duty, rnd, images)
    assert share_of(duty) == 0 and noise_in(duty, rnd, gist, gist) == {}
    whole = without_noise(duty, rnd, gist)
    assert torch.equal(whole["pooled"], whole["second"].sum(0))
    assert share_of(duty_of(images, trust="distributed", missing=1)[0]) == pytest.approx(
        duty.sigma / math.sqrt(2)
    )


def test_exposure_is_that_of_the_closed_form(images):
    """A code on the sphere of the clip radius has the cap's AUC; a code of zeros only its count."""
    q = MomentsQuery(1.0, 2, 3, mean=0.5, second=0.3, pooled=0.18, count=0.02, levels=100)

    def codes(x):
        out = torch.zeros(len(x), 2, dtype=torch.float64)
        out[:, 0] = torch.where(x.flatten(1).mean(1) > 0.5, 3.0, 0.0)
        return out

    bright = replace(images, pixels=torch.cat([torch.full_like(images.pixels[:6], 255),
                                               torch.zeros_like(images.pixels[6:])]))  # fmt: skip
    sigma = 0.8
    found = clip_and_exposure([(q, codes)], sigma, bright, 0)
    assert found["images"] == 60 and found["clip"][0]["cut"] == pytest.approx(0.1)
    normal = torch.distributions.Normal(0.0, 1.0)
    cap, none = (float(normal.cdf(torch.tensor(m / sigma / 2**0.5))) for m in (1.0, 0.02**0.5))
    assert found["exposure"]["cap"]["auc"] == pytest.approx(cap, abs=1e-6)
    assert found["exposure"]["worst"]["auc"] == pytest.approx(cap, abs=1e-6)
    assert found["exposure"]["median"]["auc"] == pytest.approx(none, abs=1e-6)
    assert {row["number"] for row in found["exposure"]["named"]} <= set(range(1, 7))
    assert clip_and_exposure([(q, codes)], 0.0, bright, 0)["exposure"] is None


def test_small_classes(images):
    duty, rnd = duty_of(images)
    (query,) = rnd.queries
    level = level_of(query, duty.sigma)
    # n codes of length R have a sum of length nR; the noise of its d numbers σR/√share each
    assert level == pytest.approx(duty.sigma * math.sqrt(128 / query.mean))
    few = images.take(torch.tensor([0, 3, 1, 4, 7]))
    rows = faint_classes(rnd, duty.sigma, images, few)
    assert [(r["held"], r["used"], r["faint"]) for r in rows] == [
        (20, 2, level > 2), (20, 3, level > 3), (20, 0, False)
    ]  # fmt: skip
    assert rows[0]["faint"] and not any(r["faint"] for r in faint_classes(rnd, 0.0, images, few))
