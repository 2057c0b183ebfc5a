"""FedSD2C: clients send codes of a few refined images, once; the server decodes. Not private.

Zhang, Liu and Wang, "One-shot Federated Learning via Synthetic Distiller-Distillate Communication",
NeurIPS 2024, https://arxiv.org/abs/2412.05186. A client trains a network h of its own, then, class
by class:

1. Core-set. Pointwise V-information of an image about its label is log h_y(x) - log h_y(∅), whose
   second term is the same for all images of a class: of several random crops of every image the one
   with the lowest -log h_y(x) stands for it, and of these the lowest are kept.
2. Perturbation. With x* an image of the class that was not kept, and F the Fourier transform of a
   channel,  x̃ = F⁻¹[ ((1 - λ) |F x| + λ |F x*|) e^{i arg F x} ]: amplitudes are mixed, phases stay.
3. Refinement. From z = E(x̃), the code of a public codec, Adam descends on the mean squared
   difference between what h's last features make of D(z) and of x.
4. It sends z and h's class probabilities of D(z). The server trains on D(z) with those, by cross
   entropy, which is the KL divergence up to a constant.

What is followed beside the equations: 10 crops, 500 images looked at and 50 kept of a class,
λ = 0.8, 50 steps along a cosine. Differences: codecs are FedGist's (128 numbers of 64 x 64 pixels)
and not Stable Diffusion's; the learning rate is in units of the codec's public spread; no
cross-entropy is added in refinement (a weight of 0.01 on one data set there); where all images of a
class are kept, x* is one of those, the image itself if there is one alone; neither h nor decoded
images are sent, as the public code does, but codes and probabilities only, as the paper says.

Codes are of single images, phases show shapes, and refinement brings back what the perturbation
took: no formal promise is made, and the claim is ε = inf. `uploaded`, which attacks are given, ends
before step 3, as the server does not know h: what really leaves shows more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.compress import as_uint8
from fedgist.encoders import load_encoder, restore
from fedgist.encoders.base import Encoder
from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._uploads import STUDENT
from fedgist.methods._weights import LOCAL, in_steps
from fedgist.privacy.client import Client
from fedgist.train import Network, Recipe, train
from fedgist.types import BATCH, Images, Outcome, Piece, Round, State, Task, Tensors

__all__ = ["FedSD2C", "core_set", "cropped", "mixed_amplitudes", "refined"]

PART = 50  # codes that are refined at once
SERVER = replace(STUDENT, label_smoothing=0.0)


def cropped(x: Tensor, area: float, rng: torch.Generator) -> Tensor:
    """Crop squares of random place and of an area share in [``area``, 1], back to full size."""
    u = torch.rand(3, len(x), generator=rng)
    side = (area + (1 - area) * u[0]).sqrt()
    theta = torch.zeros(len(x), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, :, 2] = ((2 * u[1:] - 1) * (1 - side)).T
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, "bilinear", "border", align_corners=False)


def core_set(
    network: Network,
    x: Tensor,
    label: int,
    keep: int,
    crops: int,
    area: float,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return crops of images of one class with the most V-information, and those of all others.

    Args:
        network: h.
        x: float32 ``[n, c, s, s]`` in [0, 1].
        label: of all of them.
        keep: how many are kept, at most.
        crops: of each image; 0 for the image itself.
        area: see `cropped`.
        rng: source of the crops.

    Returns:
        float32 ``[k, c, s, s]``, the most informative first, and ``[n - k, c, s, s]``.
    """
    best, chosen = torch.full((len(x),), math.inf), x.clone()
    for _ in range(max(crops, 1)):
        for i in range(0, len(x), BATCH):
            part = x[i : i + BATCH]
            seen = cropped(part, area, rng) if crops else part
            loss = -network.predict(seen)[:, label]
            rows = i + (loss < best[i : i + BATCH]).nonzero()[:, 0]
            best[rows], chosen[rows] = loss[rows - i], seen[rows - i]
    order = best.argsort(stable=True)
    return chosen[order[:keep]], chosen[order[keep:]]


def mixed_amplitudes(x: Tensor, other: Tensor, share: float) -> Tensor:
    """Return images with the phases of ``x`` and, to the share λ, the amplitudes of ``other``.

    All are float32 ``[b, c, h, w]`` in [0, 1]; what falls outside is clamped.
    """
    own, theirs = torch.fft.rfft2(x), torch.fft.rfft2(other)
    amplitude = (1 - share) * own.abs() + share * theirs.abs()
    out: Tensor = torch.fft.irfft2(torch.polar(amplitude, own.angle()), s=list(x.shape[-2:]))
    return out.clamp(0, 1)


def refined(
    network: Network, codec: Encoder, z: Tensor, x: Tensor, task: Task, steps: int, lr: float
) -> Tensor:
    """Move codes until their images have the features of ``x``; return them, float32 ``[b, d]``.

    Args:
        network: h.
        codec: whose decoder passes gradients on.
        z: float64 ``[b, d]``, where to begin.
        x: float32 ``[b, c, s, s]`` in [0, 1].
        task: of the images.
        steps: of Adam.
        lr: its highest rate, falling to 0 along a cosine.
    """
    with torch.no_grad():
        target = _features(network, x)
    code = z.to(torch.float32).requires_grad_()
    adam = torch.optim.Adam([code], lr)
    for step in range(steps):
        adam.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
        y = restore(codec.decode(code), task.channels, task.size)
        # a sum over images: each descends as if it were alone
        loss = (_features(network, y) - target).square().mean(1).sum()
        (code.grad,) = torch.autograd.grad(loss, [code])
        adam.step()
    return code.detach()


@dataclass(frozen=True)
class FedSD2C(Method):
    """Head ``fedsd2c``.

    Attributes:
        encoder: the codec: name, path or dotted name of a frozen public encoder that decodes.
        encoder_sha256: its hash, when the task pins one.
        local: how a client trains h.
        epochs: of it; 0 for ``local.steps`` updates.
        look: images of a class that a client considers, at most.
        keep: images of a class that it sends, at most.
        crops: random crops of each image that is considered; 0 for the image itself.
        area: least share of an image that a crop shows.
        share: λ.
        steps, lr: of refinement; lr is in units of the codes' public standard deviation.
        recipe: how the server trains.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    encoder: str = "gist-ae"
    encoder_sha256: str | None = None
    local: Recipe = LOCAL
    epochs: float = 10.0
    look: int = 500
    keep: int = 50
    crops: int = 10
    area: float = 0.5
    share: float = 0.8
    steps: int = 50
    lr: float = 0.05
    recipe: Recipe = SERVER

    def __post_init__(self) -> None:
        for name, least in (("look", 1), ("keep", 1), ("crops", 0), ("steps", 0), ("epochs", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"method.{name} must be at least {least}. Got {getattr(self, name)}"
                )
        if not (0 <= self.share <= 1 and 0 < self.area <= 1 and self.lr > 0):
            raise ConfigError(
                "method.share must lie in [0, 1], area in (0, 1] and lr above 0. "
                f"Got {self.share}, {self.area}, {self.lr}"
            )

    @cached_property
    def codec(self) -> Encoder:
        """The codec, loaded.

        Raises:
            ConfigError: it does not decode.
        """
        codec = load_encoder(self.encoder, self.encoder_sha256)
        if not codec.decodes:
            raise ConfigError(f"method.encoder must be a codec. Got '{self.encoder}'")
        return codec

    @property
    def track(self) -> str:
        """Which public data the codec has seen."""
        return self.codec.track

    def encoders(self) -> tuple[str, ...]:
        """The codec."""
        return (self.encoder,)

    @property
    def notes(self) -> tuple[str, ...]:
        """What leaves besides, and what is promised."""
        return (
            "class probabilities by the client's own network, and how many it sends, are in clear",
            "Fourier amplitudes are mixed, no noise is added: nothing is promised about an image",
        )

    @property
    def random(self) -> bool:
        """The image that amplitudes come from is drawn."""
        return True

    def used(self, images: Images) -> Images:
        """Any image may be among those sent."""
        return images

    def uploaded(self, task: Task, shared: Tensors, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return images decoded from codes that are not refined; any other image is x*."""
        other = x[torch.randperm(len(x), generator=rng)]
        mixed = torch.split(mixed_amplitudes(x, other, self.share), BATCH)
        return torch.cat([self._decoded(task, self.codec.encode_task(m)) for m in mixed])

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan one raw pool of codes and probabilities."""
        sends = (
            Piece("codes", (-1, self.codec.dim), "float32"),
            Piece("probabilities", (-1, len(task.classes)), "float32"),
        )
        return [Round("pool", raw=True, sends=sends)]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Train, choose, perturb and refine, class by class."""
        images = client.raw()
        codes = [torch.zeros(0, self.codec.dim)]
        said = [torch.zeros(0, len(task.classes))]
        if len(images):
            network = train(images, in_steps(self.local, self.epochs, len(images)), rng)
            for label in range(len(task.classes)):
                rows = (images.labels == label).nonzero()[:, 0]
                rows = rows[torch.randperm(len(rows), generator=rng)[: self.look]]
                kept, rest = core_set(
                    network, images.floats(rows), label, self.keep, self.crops, self.area, rng
                )
                for z in self._distilled(task, network, kept, rest, rng):
                    codes.append(z)
                    said.append(network.predict(self._decoded(task, z)).exp())
        return {"codes": torch.cat(codes), "probabilities": torch.cat(said)}

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Decode, train."""
        started = time.perf_counter()
        z, p = state.server.tensors["codes"], state.server.tensors["probabilities"]
        total = p.sum(1, keepdim=True)
        fine = z.isfinite().all(1) & (p >= 0).all(1) & ((total - 1).abs() < 1e-2)[:, 0]
        z, p = z[fine], (p / total)[fine]
        if len(z):
            pixels = torch.cat([as_uint8(self._decoded(task, b)) for b in torch.split(z, BATCH)])
        else:  # nobody has sent any: grey images, from which nothing is learned
            p = torch.eye(len(task.classes))
            pixels = as_uint8(torch.full((len(p), task.channels, task.size, task.size), 0.5))
        decoded = Images(pixels, p.argmax(1), task.classes)
        network = train(decoded, self.recipe, rng, soft_labels=p)
        details = {"seconds": {"server": time.perf_counter() - started}, "images": len(z)}
        return Outcome(None, {"fedsd2c": network}, details)

    def _distilled(
        self, task: Task, network: Network, kept: Tensor, rest: Tensor, rng: torch.Generator
    ) -> list[Tensor]:
        """Return refined codes of images of one class, float32, `PART` at a time."""
        lr = self.lr * float(self.codec.public.cov.diagonal().mean()) ** 0.5
        pool, out = rest if len(rest) else kept, []
        for x in torch.split(kept, PART) if len(kept) else ():
            other = pool[torch.randint(len(pool), (len(x),), generator=rng)]
            z = self.codec.encode_task(mixed_amplitudes(x, other, self.share))
            out.append(refined(network, self.codec, z, x, task, self.steps, lr))
        return out

    @torch.no_grad()
    def _decoded(self, task: Task, z: Tensor) -> Tensor:
        return restore(self.codec.decode(z), task.channels, task.size)


def _features(network: Network, x: Tensor) -> Tensor:
    """Return what goes into the last layer, ``[b, f]``; differentiable in x."""
    inputs = (x - network.mean[:, None, None]) / network.std[:, None, None]
    out: Tensor = network.model.get_submodule("features")(inputs)
    return out
