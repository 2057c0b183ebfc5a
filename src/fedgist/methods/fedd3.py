"""FedD3: clients distil their images for a kernel, once; the server trains a network. Not private.

Song et al., "Federated Learning via Decentralized Dataset Distillation in Resource-Constrained Edge
Environments", IJCNN 2023, https://arxiv.org/abs/2208.11311. Two of its instances:

* ``kip`` (kernel inducing points: Nguyen et al., ICLR 2021, https://arxiv.org/abs/2011.00050): a
  few real images of each class are moved by Adam until kernel ridge regression on them predicts the
  client's other images, under the neural tangent kernel of a fully connected network (`_ntk`).
  Labels are one-hot, less 1/C, and stay as they are;
* ``coreset``: the means of a mixture of Gaussians, fitted to each class.

Public code leaves images in the units of each client's own mean and deviation, which the server
does not know; stops as soon as a batch is predicted, which for a client of one class is at once;
and fails where a class has fewer images than its share. Here inputs of the kernel are normalised by
public constants, images stay in [0, 1] and leave as bytes, all steps are taken, and repeated
images are disturbed. Targets are drawn evenly from the classes a client holds, as there. Mixtures
have diagonal covariances: full ones have more numbers than a client has pixels.

Images that start as real ones, and means of real ones, would give records away whatever came after:
the claim is ε = inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.method import Gist, Method
from fedgist.methods._distil import Canvas, Server, check_options, gist, pieces
from fedgist.methods._ntk import Kernel, regression
from fedgist.methods._weights import CENTRE, SPREAD
from fedgist.privacy.client import Client
from fedgist.types import Images, Outcome, Round, State, Task, Tensors

__all__ = ["FedD3", "loss_of"]

CANVAS, SERVER = Canvas(10, 1), Server()
DISTURBED = 0.05  # deviation of the noise on a repeated image


@dataclass(frozen=True)
class FedD3(Method):
    """Distilled images from every client, once, without privacy; head ``distilled``.

    Attributes:
        canvas: images of each class and how they are stored.
        instance: how they are made.
        steps: of Adam (``kip``).
        targets: real images in a step, at most; of each class that is held alike.
        lr: highest rate of Adam, in units of [0, 1]; falls to 0 along a cosine.
        ridge: in units of the mean of the kernel's diagonal.
        depth: hidden layers of the kernel's network.
        server: how the network is trained.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    canvas: Canvas = CANVAS
    instance: Literal["kip", "coreset"] = "kip"
    steps: int = 300
    targets: int = 200
    lr: float = 0.02
    ridge: float = 1e-6
    depth: int = 4
    server: Server = SERVER

    def __post_init__(self) -> None:
        check_options(self, "steps", "targets", "lr", "ridge")
        assert self.kernel  # its own errors

    @property
    def kernel(self) -> Kernel:
        """What regression goes by."""
        return Kernel(self.depth)

    @property
    def unfit(self) -> str:
        """Why real data must not be given to it."""
        return "fedd3: images that start as real ones, or are means of a few, give records away"

    def plan(self, task: Task) -> Sequence[Round]:
        """One raw pool round."""
        return [Round("pool", raw=True, sends=pieces(self.canvas, task))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Distil; a class that is not held has noise, which the server leaves out."""
        images = client.raw()
        free = self.canvas.start(task, rng)
        held = (images.counts() > 0).nonzero()[:, 0]
        if len(held) and self.instance == "kip":
            free[held] = self._moved(images, held, task, rng)
        elif len(held):
            for c in held.tolist():
                free[c] = self._means(images.take(images.labels == c), task, rng)
        return gist(free, images.counts().to(torch.float32))

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Pool the images of the classes that each client holds, and train on them."""
        return self.server.outcome(state.server.tensors, self.canvas, task, 1.0, rng)

    def _real(self, images: Images, task: Task, rng: torch.Generator) -> Tensor:
        """Return random images of one class, ``[tiles, ...]``, those that repeat disturbed."""
        side, order = self.canvas.tile(task), torch.randperm(len(images), generator=rng)
        places = torch.arange(self.canvas.formed)
        x = F.adaptive_avg_pool2d(images.floats(order[places % len(images)]), (side, side))
        noise = DISTURBED * torch.randn(x.shape, generator=rng)
        return (x + noise * (places >= len(images))[:, None, None, None]).clamp(0, 1)

    def _moved(self, images: Images, held: Tensor, task: Task, rng: torch.Generator) -> Tensor:
        """Return images of the classes ``held``, int64 ``[k]``, moved by their loss."""
        classes, rows = len(task.classes), [(images.labels == c).nonzero()[:, 0] for c in held]
        begun = [self._real(images.take(of), task, rng) for of in rows]
        free = torch.stack(begun).requires_grad_()
        labels = held.repeat_interleave(self.canvas.formed)
        optimiser = torch.optim.Adam([free], self.lr)
        each = math.ceil(self.targets / len(held))
        for step in range(self.steps):
            draws = [of[torch.randint(len(of), (each,), generator=rng)] for of in rows]
            chosen = torch.cat(draws)
            support = self.canvas.form(free, task)
            x, y = images.floats(chosen), images.labels[chosen]
            loss = loss_of(self.kernel, support, labels, x, y, classes, self.ridge)
            (free.grad,) = torch.autograd.grad(loss, free)
            rate = self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2
            optimiser.param_groups[0]["lr"] = rate
            optimiser.step()
            with torch.no_grad():
                free.clamp_(0, 1)
        return free.detach()

    def _means(self, images: Images, task: Task, rng: torch.Generator) -> Tensor:
        """Return means of a mixture of one class; of fewer images than means, images."""
        from sklearn.mixture import GaussianMixture  # a second that other methods can spare

        count, side = self.canvas.formed, self.canvas.tile(task)
        if len(images) <= count:
            return self._real(images, task, rng)
        x = F.adaptive_avg_pool2d(images.floats(), (side, side))
        mixture = GaussianMixture(
            count,
            covariance_type="diag",
            reg_covar=1e-3,
            random_state=int(torch.randint(2**31, (), generator=rng)),
        )
        means = mixture.fit(x.flatten(1).numpy()).means_
        return torch.from_numpy(means).to(torch.float32).view(count, *x.shape[1:]).clamp(0, 1)


def loss_of(
    kernel: Kernel,
    support: Tensor,
    labels: Tensor,
    targets: Tensor,
    truth: Tensor,
    classes: int,
    ridge: float,
) -> Tensor:
    """Return half the mean squared error of kernel ridge regression; differentiable in ``support``.

    Args:
        kernel: of rows.
        support: float32 ``[m, c, h, w]`` in [0, 1].
        labels: int64 ``[m]``.
        targets: float32 ``[n, c, h, w]`` in [0, 1].
        truth: int64 ``[n]``.
        classes: C.
        ridge: see `_ntk.regression`.
    """
    a, b = ((x.double().flatten(1) - CENTRE) / SPREAD for x in (support, targets))
    y, z = (F.one_hot(t, classes).double() - 1 / classes for t in (labels, truth))
    return (regression(kernel, a, y, b, ridge) - z).square().mean() / 2
