"""Distillation under DP: per-record gradients, rules, filters, canvases, and the published flaw."""

from __future__ import annotations

import math

import pytest
import torch

from fedgist.encoders import RandomConv
from fedgist.errors import ConfigError
from fedgist.methods._descent import (
    Descent,
    Rule,
    View,
    follow,
    gradient_query,
    matching_gradient,
)
from fedgist.methods._distil import Canvas, gist, pieces, pooled_images
from fedgist.methods._gradients import by_copies, by_jacobian, by_vmap
from fedgist.methods._siamese import siamese
from fedgist.methods._start import Beginning
from fedgist.methods._sums import rates_of, signal_level
from fedgist.methods.anis import ANIS
from fedgist.methods.ppfl_dc import _loss_gradients
from fedgist.privacy.client import Client
from fedgist.privacy.noise import SeededNoise
from fedgist.types import Images, Task


@pytest.fixture
def canvas() -> Canvas:
    return Canvas(2, 2)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def view_of(task: Task, canvas: Canvas, policy="flip") -> View:
    nets = RandomConv(5, 1, 3, strided=True)
    return View(lambda x, y: nets.embed(x)[:, 0], canvas, task, policy, rng())


@pytest.mark.parametrize("features", ["embedding", "loss gradients"])
def test_three_ways_to_a_records_gradient_agree_with_its_loss(task, images, canvas, features):
    view = view_of(task, canvas)
    if features == "loss gradients":
        view = View(_loss_gradients(task, 2, rng()), canvas, task, "none", rng())
    free = canvas.start(task, rng(1))
    x, y = images.floats(slice(0, 5)), images.labels[:5]
    v = view.cotangents(free, x, y)
    rows = [ways(view.means, free, y, v) for ways in (by_copies, by_vmap, by_jacobian)]
    for i in range(5):  # the loss of one record, differentiated as it stands
        own = free.clone().requires_grad_()
        seen = view.means(own[y[i]][None], y[i : i + 1])[0]
        loss = (view.real(x[i : i + 1], y[i : i + 1])[0] - seen).square().sum()
        (wanted,) = torch.autograd.grad(loss, own)
        for row in rows:
            assert torch.allclose(row[i], wanted[y[i]], atol=1e-6)


def test_rules_bound_every_gradient_by_one():
    g = torch.randn(40, 30, generator=rng()) * torch.logspace(-4, 3, 40)[:, None]
    bound = torch.full((40,), 0.5)
    for kind in ("normalised", "fixed", "quantile"):
        rule = Rule(kind, clip=0.5)
        rows = rule.rows(g, bound)
        assert float(rows.norm(dim=1).max()) <= rule.norm * (1 + 1e-6)
        direction = torch.nn.functional.cosine_similarity(rows[:, :30], g)
        assert float(direction.min()) > 1 - 1e-5
    fixed = Rule("fixed", clip=0.5).rows(g, bound)
    small = g.norm(dim=1) < 0.5
    assert torch.allclose(fixed[small], g[small] / 0.5)  # in units of the clip


def test_a_quantile_clip_finds_its_quantile_from_told_shares():
    norms = torch.linspace(0.1, 10, 1000)
    for quantile in (0.25, 0.5, 0.9):
        rule, bounds = Rule("quantile", clip=0.2, quantile=quantile), torch.tensor([0.2])
        for _ in range(200):
            rows = rule.rows(norms[:, None], bounds.expand(1000))
            bounds = rule.next(bounds, rows[:, 1].mean()[None])
        assert float(bounds) == pytest.approx(0.1 + 9.9 * quantile, rel=0.05)


def test_normalised_residuals_give_the_class_mean_back():
    """Exactly for records at one distance from what is seen, nearly for any on the sphere."""
    source = rng(3)
    records = torch.nn.functional.normalize(torch.randn(400, 64, generator=source) + 0.05, dim=1)
    axis = torch.nn.functional.normalize(torch.randn(64, generator=source), dim=0)
    around = records - (records @ axis)[:, None] * axis  # all at 60 degrees from the axis
    ring = 0.5 * axis + math.sqrt(0.75) * torch.nn.functional.normalize(around, dim=1)
    rule = Rule("normalised")
    for x, tolerance in ((ring, 1e-5), (records, 0.01)):
        seen = 0.6 * axis
        residuals = seen - x
        h = (residuals / residuals.norm(dim=1, keepdim=True)).mean(0)
        length = rule.length(h[None], seen[None], torch.ones(1))
        assert float((seen - length * h - x.mean(0)).norm()) < tolerance
    clip = torch.tensor([0.7])
    assert Rule("fixed").length(h[None], seen[None], clip) is clip


def test_releases_are_asked_once_and_followed_often(task, canvas):
    view = view_of(task, canvas, "none")
    start = canvas.start(task, rng(1))
    target = view.seen(canvas.start(task, rng(2)))
    for passes in (1, 4):
        asked: list[int] = []

        def ask(asked=asked):
            asked.append(1)
            return view, target, torch.zeros(3)

        descent = Descent(start, 0.05, 3 * passes)
        follow(descent, 3, passes, ask)
        assert len(asked) == 3
        left = (view.seen(descent.free) - target).norm()
        assert left < (view.seen(start) - target).norm() * (1 if passes == 1 else 0.7)


def test_the_published_clip_can_only_shrink_and_gives_neighbours_different_noise():
    """Algorithm 2, line 9, on gradients that are all clipped, of alignment κ."""
    kappa, clips = 0.9, [1.0, 1.0, 1.0]
    for _ in range(100):
        norms = [kappa * c for c in clips[-3:]]  # ‖mean of clipped gradients‖ = κ C
        clips.append(sum(norms) / 3)
    assert all(clips[i] <= max(clips[i - 3 : i]) for i in range(3, len(clips)))
    assert clips[52] < 0.1 and clips[102] < 0.01
    # data without any gradient bring noise to nothing; one record more does not: no finite ε
    quiet, loud = torch.zeros(8, 4), torch.cat([torch.zeros(7, 4), torch.ones(1, 4)])
    scales = [float(g.mean(0).norm()) for g in (quiet, loud)]
    assert scales[0] == 0 < scales[1]


@pytest.fixture
def flat(task: Task) -> Images:
    pixels = torch.full((30, 1, 8, 8), 128, dtype=torch.uint8)
    return Images(pixels, torch.arange(30) % 3, task.classes)


def test_the_paper_mode_runs_to_the_letter_and_says_why_it_is_not_private(task, images):
    method = ANIS(Canvas(1, 1), rounds=6, batch=4, width=2, parity="paper", clip=0.05)
    (rnd,) = method.plan(task)
    assert rnd.raw and not rnd.queries and "no finite ε" in method.unfit
    guard = Client("c", images, rnd, sigma=0.0, noise=SeededNoise(0), max_images=500)
    made = method.summarize(0, task, {}, guard, rng())
    assert {p.name: p.shape for p in rnd.sends} == {k: tuple(v.shape) for k, v in made.items()}
    again = ANIS(Canvas(1, 1), rounds=6, batch=4, width=2, parity="paper", clip=0.05)
    guard = Client("c", images, rnd, sigma=0.0, noise=SeededNoise(1), max_images=500)
    assert torch.equal(again.summarize(0, task, {}, guard, rng())["pixels"], made["pixels"])


def test_canvas_forms_sends_and_pools(task, canvas):
    assert canvas.formed == 8 and canvas.shape(task) == (8, 1, 4, 4)
    free = canvas.start(task, rng())
    assert free.shape == (3, 8, 1, 4, 4) and 0 <= float(free.min()) <= float(free.max()) <= 1
    assert canvas.form(free, task).shape == (24, 1, 8, 8)
    one = gist(free, torch.tensor([50.0, 3.0, -2.0]))
    assert {p.name: p.shape for p in pieces(canvas, task)} == {
        k: tuple(v.shape) for k, v in one.items()
    }
    two = gist(1 - free, torch.tensor([1.0, 40.0, 1.0]))
    both = {k: torch.cat([one[k], two[k]]) for k in one}
    images = pooled_images(both, canvas, task, least=10)
    # class c is kept from both: nobody has ten of it, and a class must not vanish
    assert images.counts().tolist() == [8, 8, 16]
    first = canvas.form(free[0], task)
    assert float((images.floats(images.labels == 0) - first).abs().max()) < 0.01


def test_siamese_draws_are_one_map_for_all_images_and_differentiable():
    x = torch.rand(3, 1, 12, 12, generator=rng(4))
    source = rng(2)
    kinds = set()
    for _ in range(30):
        apply = siamese("flip", source)
        batch, one = apply(x), apply(x[1:2])
        assert torch.allclose(batch[1:2], one, atol=1e-6)
        kinds.add(float((batch - x).abs().mean() > 1e-3))
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(apply(leaf).sum(), leaf)
        assert bool(g.isfinite().all())
    assert kinds == {0.0, 1.0}
    assert siamese("none", source)(x) is x


def test_steps_filter_noise_by_its_known_size():
    """Noise alone moves images little; a smooth signal below the noise per pixel comes through."""
    free = torch.full((2, 4, 1, 16, 16), 0.5)
    signal = torch.zeros_like(free)
    signal[0] = torch.linspace(-1, 1, 16)[:, None] * 0.3
    source, cosine = rng(1), {}
    for std in (0.0, 1.0):
        descent = Descent(free.clone(), 0.1, 30)
        for _ in range(30):
            noise = torch.randn(free.shape, generator=source)
            descent.step(signal + noise, std)
        moved = 0.5 - descent.free[0]
        cosine[std] = float((moved * signal[0]).sum() / (moved.norm() * signal[0].norm()))
    assert cosine[1.0] > 0.8 > cosine[0.0] + 0.1


def test_residuals_within_their_noise_do_not_pull(task, canvas):
    view = view_of(task, canvas, "none")
    free = canvas.start(task, rng())
    with torch.no_grad():
        seen = torch.cat([view.means(f[None], torch.tensor([c])) for c, f in enumerate(free)])
    target = seen + 0.1 * torch.randn(seen.shape, generator=rng(3))
    strong = matching_gradient(view, target, free, torch.zeros(3))
    weak = matching_gradient(view, target, free, torch.full((3,), 0.2))
    assert float(strong.norm()) > 0 and float(weak.norm()) == 0


def test_rates_are_public_and_fit_the_classes(task):
    assert rates_of(10, (40,), task) == (0.25,)
    assert rates_of(10, (40, 5, 100), task) == (0.25, 1.0, 0.1)
    with pytest.raises(ConfigError, match="one for each of the 3"):
        rates_of(10, (40, 5), task)
    query = gradient_query(task, Canvas(1, 2), Rule("quantile"), (0.25,), 7)
    assert query.shape == (3, 4 * 16 + 1) and query.times == 7
    assert query.clip == pytest.approx(math.hypot(1, 0.25))
    assert all(q.rates == (1.0,) for q in Beginning(task, Canvas(), "noise", (1.0,)).queries)
    assert signal_level(query, 0.0) == 16 < signal_level(query, 1.0)


@pytest.mark.parametrize("strategy", ["normalised", "fixed", "quantile"])
@pytest.mark.parametrize("bounded", ["residual", "gradient"])
def test_without_noise_images_come_to_look_like_their_class(task, images, bounded, strategy):
    """The mean image of a class is nearer to its own synthetic images than to the others'."""
    sampled = {"batch": 20, "class_size": (20,), "augment": "none", "start_at": "noise"}
    how = {"bounded": bounded, "strategy": strategy, "clip": 1.0 if bounded == "residual" else 0.1}
    method = ANIS(Canvas(4, 1), rounds=60, passes=1, width=8, **sampled, **how)
    (rnd,) = method.plan(task)
    width = 16 * 8 if bounded == "residual" else 4 * 64
    assert rnd.queries[-1].shape == (3, width + (strategy == "quantile"))
    assert rnd.queries[-1].name == bounded and rnd.queries[-1].times == 60
    guard = Client("c", images, rnd, sigma=0.0, noise=SeededNoise(0), max_images=500, exact=True)
    made = method.summarize(0, task, {}, guard, rng())
    synthetic = made["pixels"].double().view(3, 4, -1).mean(1)
    real = torch.stack([images.floats(images.labels == c).mean(0).flatten() for c in range(3)])
    synthetic = synthetic - synthetic.mean(0)
    real = (real - real.mean(0)).double()
    assert (synthetic @ real.T).argmax(1).tolist() == [0, 1, 2]
