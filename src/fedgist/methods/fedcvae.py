"""FedCVAE: clients send the decoder of a conditional autoencoder, the server samples. Not private.

Heinbaugh, Luz-Ricca and Shao, "Data-Free One-Shot Federated Learning Under Very High Statistical
Heterogeneity", ICLR 2023, https://openreview.net/forum?id=_hb4vM3jspB. Each client trains a
conditional variational autoencoder on its images x with labels y by minimising

    -log p(x | z, y) + β KL(q(z | x, y) ‖ N(0, I)),        z = m(x, y) + s(x, y) ξ,  ξ ~ N(0, I)

with p a product of Bernoulli pixels and q a Gaussian with diagonal covariance, so that the terms of
an image are Σ binary cross-entropies and ½ Σ (s² + m² - 1 - log s²). It sends the decoder p and how
many images of each class it has. The server draws labels as the client has them, z from N(0, I)
truncated to [-r, r] in each number, and takes the decoder's mean for an image:

* ``ens`` (FedCVAE-Ens): from every decoder in proportion to the client's images; a classifier is
  trained on all of them.
* ``kd`` (FedCVAE-KD): the same draws first teach one decoder, z and y in, images out, by the same
  cross-entropy; from that one come images of all classes alike.

Differences from the paper: both networks are multilayer perceptrons of one size for every data set
and not convolutional ones; the centre of the prior stays at 0 (the paper shifts it so that who has
the decoder without knowing the shift samples worse; the server, which is the adversary here, knows
it); the share of images and the distribution of labels are sent as counts, which say both; ``kd``
draws only classes that some client has; settings are ours.

A decoder was trained on the images without noise, and counts leave in clear: the claim is ε = inf.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.compress import as_uint8
from fedgist.errors import ConfigError, DataError
from fedgist.method import Gist, Method
from fedgist.methods._weights import flat
from fedgist.privacy.client import Client
from fedgist.train import Network, Recipe, train
from fedgist.train.models import initialise
from fedgist.types import BATCH, Images, Outcome, Piece, Round, State, Task, Tensors

__all__ = ["FedCVAE", "decoder_of", "elbo_terms", "truncated"]

# as for images that ``fedkt_csd`` decodes, where it was better than a convolutional network
STUDENT = Recipe(model="mlp", width=512, steps=800, batch=128, lr=1e-3, label_smoothing=0.0)


def elbo_terms(x: Tensor, logits: Tensor, mean: Tensor, log_var: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p(x | z, y) and KL(q ‖ N(0, I)) of every image, in nats, each ``[b]``.

    Args:
        x: pixels in [0, 1], ``[b, d]``.
        logits: of the decoder, ``[b, d]``.
        mean: m, ``[b, l]``.
        log_var: log s², ``[b, l]``.
    """
    cross = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    return cross, 0.5 * (log_var.exp() + mean.square() - 1 - log_var).sum(1)


def truncated(shape: Sequence[int], bound: float, rng: torch.Generator) -> Tensor:
    """Draw from N(0, 1) given that it lies in [-bound, bound], float32, by the inverse of erf."""
    u = torch.rand(tuple(shape), generator=rng, dtype=torch.float64) * 2 - 1
    z: Tensor = math.sqrt(2) * torch.erfinv(u * math.erf(bound / math.sqrt(2)))
    return z.clamp(-bound, bound).to(torch.float32)


def decoder_of(task: Task, latent: int, width: int) -> nn.Sequential:
    """Return a decoder without values: ``[b, latent + classes]`` to logits of pixels ``[b, d]``."""
    return _perceptron(latent + len(task.classes), width, task.channels * task.size**2)


@dataclass(frozen=True)
class FedCVAE(Method):
    """Heads ``ens`` and ``kd``, named ``fedcvae_ens`` and ``fedcvae_kd``.

    Attributes:
        heads: which to build; the synthetic set is the first one's.
        latent: numbers in z.
        width: of the hidden layers of encoder and decoder.
        beta: β.
        epochs: a client's passes over its images.
        batch: images in an update.
        lr: of Adam, at clients and for ``kd``.
        images: that the server draws, for each head.
        bound: r.
        distil_epochs: passes of ``kd`` over the drawn images.
        recipe: how the classifier is trained.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    heads: tuple[Literal["ens", "kd"], ...] = ("ens",)
    latent: int = 10
    width: int = 256
    beta: float = 1.0
    epochs: float = 15.0
    batch: int = 64
    lr: float = 1e-3
    images: int = 10_000
    bound: float = 2.0
    distil_epochs: float = 10.0
    recipe: Recipe = STUDENT

    def __post_init__(self) -> None:
        if not self.heads or len(set(self.heads)) != len(self.heads):
            raise ConfigError(f"method.heads must be distinct and not empty. Got {self.heads}")
        for name in ("latent", "width", "epochs", "batch", "lr", "images", "bound"):
            if not 0 < (got := getattr(self, name)) < math.inf:
                raise ConfigError(f"method.{name} must be positive. Got {got}")
        if not (0 <= self.beta < math.inf and 0 < self.distil_epochs < math.inf):
            raise ConfigError(
                "method.beta must not be negative and method.distil_epochs must be positive. "
                f"Got {self.beta} and {self.distil_epochs}"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the claim must know besides."""
        return (
            "the server has each client's own decoder, from which it draws that client's kind of "
            "images, and how many images of each class it has",
        )

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan one raw pool of decoders and counts."""
        size = sum(p.numel() for p in decoder_of(task, self.latent, self.width).parameters())
        sends = (
            Piece("decoder", (1, size), "float32"),
            Piece("counts", (1, len(task.classes)), "float32"),
        )
        return [Round("pool", raw=True, sends=sends)]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Train the autoencoder; send the decoder, zeros where there are no images.

        Raises:
            ConfigError: training diverged.
        """
        images = client.raw()
        decoder = self._fresh(task, rng)
        if len(images):
            self._fit(task, decoder, images, rng)
        weights = flat(decoder) if len(images) else torch.zeros_like(flat(decoder))
        if not bool(weights.isfinite().all()):
            raise ConfigError(
                f"local training must stay finite. Got NaN or Inf with learning rate {self.lr:g}: "
                "use a smaller method.lr"
            )
        return {"decoder": weights[None], "counts": images.counts().to(torch.float32)[None]}

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Draw images and train on them, for each head."""
        weights, counts = _usable(state.server.tensors, task)
        synthetic: dict[str, Images] = {}
        classifiers: dict[str, Network] = {}
        seconds = {"draw": 0.0, "train": 0.0}
        for head in self.heads:
            started = time.perf_counter()
            z, y, pixels = self._drawn(task, weights, counts, rng)
            if head == "kd":
                teacher = self._distilled(task, z, y, pixels, rng)
                held = (counts.sum(0) > 0).nonzero()[:, 0]
                y = held[torch.arange(self.images) % len(held)]
                pixels = self._decode(task, teacher, truncated(z.shape, self.bound, rng), y)
            drawn = time.perf_counter()
            synthetic[head] = Images(pixels, y, task.classes)
            classifiers[f"fedcvae_{head}"] = train(synthetic[head], self.recipe, rng)
            seconds["draw"] += drawn - started
            seconds["train"] += time.perf_counter() - drawn
        details = {"counts": counts.sum(0).tolist(), "seconds": seconds}
        return Outcome(synthetic[self.heads[0]], classifiers, details)

    def _fresh(self, task: Task, rng: torch.Generator) -> nn.Sequential:
        decoder = decoder_of(task, self.latent, self.width).to_empty(device="cpu")
        initialise(decoder, rng)
        return decoder

    def _fit(
        self, task: Task, decoder: nn.Sequential, images: Images, rng: torch.Generator
    ) -> None:
        """Train ``decoder`` with an encoder that is then dropped."""
        classes = len(task.classes)
        pixels = images.pixels[0].numel()
        encoder = _perceptron(pixels + classes, self.width, 2 * self.latent).to_empty(device="cpu")
        initialise(encoder, rng)
        with torch.no_grad():
            encoder[-1].weight.mul_(0.1)  # type: ignore[operator]  # q near the prior
        adam = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], self.lr)
        for rows in self._batches(len(images), self.epochs, rng):
            x = images.floats(rows).flatten(1)
            y = F.one_hot(images.labels[rows], classes).to(torch.float32)
            mean, log_var = encoder(torch.cat([x, y], 1)).chunk(2, dim=1)
            xi = torch.randn(mean.shape, generator=rng)
            z = mean + (0.5 * log_var).exp() * xi
            cross, kl = elbo_terms(x, decoder(torch.cat([z, y], 1)), mean, log_var)
            adam.zero_grad()
            torch.autograd.backward((cross + self.beta * kl).mean())
            adam.step()

    def _distilled(
        self, task: Task, z: Tensor, y: Tensor, pixels: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Return the weights of one decoder that says what all of them said."""
        decoder = self._fresh(task, rng)
        adam = torch.optim.Adam(decoder.parameters(), self.lr)
        for rows in self._batches(len(z), self.distil_epochs, rng):
            x = pixels[rows].flatten(1).to(torch.float32) / 255
            logits = decoder(_given(z[rows], y[rows], task))
            adam.zero_grad()
            cross = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
            torch.autograd.backward(cross.mean())
            adam.step()
        return flat(decoder)

    def _batches(self, n: int, epochs: float, rng: torch.Generator) -> Iterator[Tensor]:
        """Yield positions: ``epochs`` passes in random orders, one batch at least."""
        size = min(self.batch, n)
        order = torch.zeros(0, dtype=torch.int64)
        for _ in range(max(1, round(epochs * n / size))):
            if len(order) < size:
                order = torch.randperm(n, generator=rng)
            yield order[:size]
            order = order[size:]

    def _drawn(
        self, task: Task, weights: Tensor, counts: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return z, labels and uint8 images from every client's decoder."""
        share = counts.sum(1).to(torch.float64) / counts.sum()
        ends = (share.cumsum(0) * self.images).round().to(torch.int64).tolist()
        zs, ys, xs = [], [], []
        for w, pmf, n in zip(weights, counts, _differences(ends), strict=True):
            zs.append(truncated((n, self.latent), self.bound, rng))
            y = torch.zeros(0, dtype=torch.int64)
            if n:
                y = torch.multinomial(pmf, n, replacement=True, generator=rng)
            ys.append(y)
            xs.append(self._decode(task, w, zs[-1], y))
        return torch.cat(zs), torch.cat(ys), torch.cat(xs)

    @torch.no_grad()
    def _decode(self, task: Task, weights: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """Return mean images, uint8 ``[n, c, s, s]``."""
        decoder = decoder_of(task, self.latent, self.width).to_empty(device="cpu")
        nn.utils.vector_to_parameters(weights, decoder.parameters())
        shape = (task.channels, task.size, task.size)
        out = torch.empty(len(z), *shape, dtype=torch.uint8)
        for i in range(0, len(z), BATCH):
            given = _given(z[i : i + BATCH], y[i : i + BATCH], task)
            out[i : i + BATCH] = as_uint8(torch.sigmoid(decoder(given)).view(-1, *shape))
        return out


def _perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    with torch.device("meta"):  # layers would otherwise draw from the global generator
        return nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )


def _given(z: Tensor, y: Tensor, task: Task) -> Tensor:
    return torch.cat([z, F.one_hot(y, len(task.classes)).to(torch.float32)], 1)


def _differences(ends: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def _usable(tensors: Tensors, task: Task) -> tuple[Tensor, Tensor]:
    """Return decoders ``[k, P]`` and counts ``[k, C]`` of clients that have images.

    Where nobody has, one decoder of zeros: grey images of all classes, that teach nothing.

    Raises:
        DataError: a decoder or counts that are not finite, or counts below 0.
    """
    weights, counts = tensors["decoder"], tensors["counts"]
    if not bool(weights.isfinite().all() and counts.isfinite().all() and (counts >= 0).all()):
        raise DataError("decoders must be finite, and counts finite and not negative. Got others")
    have = counts.sum(1) > 0
    if not bool(have.any()):
        return torch.zeros_like(weights[:1]), torch.ones(1, len(task.classes))
    return weights[have], counts[have]
