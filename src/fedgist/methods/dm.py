"""Distribution matching on every client, from real images, once. Not private.

Zhao and Bilen, "Dataset Condensation with Distribution Matching", WACV 2023,
https://arxiv.org/abs/2110.04181, as one-shot federated learning uses it: what the private methods
(`anis`, `ndpdc`, `collab_dm`) are held against. Images start as real ones, the published default,
which alone would give records away whatever came after: its ε is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.method import Gist, Method
from fedgist.methods._descent import Descent, matching_gradient, random_view
from fedgist.methods._distil import Canvas, Server, check_options, gist, pieces
from fedgist.methods._siamese import Policy
from fedgist.privacy.client import Client
from fedgist.types import Images, Outcome, Round, State, Task, Tensors

__all__ = ["DM"]

CANVAS, SERVER = Canvas(10), Server()


@dataclass(frozen=True)
class DM(Method):
    """Distilled images from every client, once, without privacy; head ``distilled``.

    Attributes:
        canvas: images per class and how they are stored.
        steps: each under a fresh network.
        batch: real images of a class in a step.
        lr: the highest step, root mean square over a class's pixels; falls to 0 along a cosine.
        width: channels of the random networks.
        augment: `_siamese.siamese`; ``shift`` where a mirrored image means something else.
        server: how the network is trained.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    canvas: Canvas = CANVAS
    steps: int = 50
    batch: int = 32
    lr: float = 0.01
    width: int = 16
    augment: Policy = "flip"
    server: Server = SERVER

    def __post_init__(self) -> None:
        check_options(self, "steps", "batch", "lr", "width")

    @property
    def unfit(self) -> str:
        """Why real data must not be given to it."""
        return "dm: images that start as real ones give records away"

    def plan(self, task: Task) -> Sequence[Round]:
        """One raw pool round."""
        return [Round("pool", raw=True, sends=pieces(self.canvas, task))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Take real images and move them until random networks see the class in them."""
        images = client.raw()
        held = images.counts() > 0
        descent = Descent(self._real(images, task, rng), self.lr, self.steps)
        for _ in range(self.steps):
            view = random_view(self.canvas, task, self.augment, rng, width=self.width)
            target = torch.zeros(len(task.classes), 16 * self.width)
            for c in held.nonzero()[:, 0].tolist():
                rows = (images.labels == c).nonzero()[:, 0]
                rows = rows[torch.randperm(len(rows), generator=rng)[: self.batch]]
                target[c] = view.real(images.floats(rows), images.labels[rows]).mean(0)
            gradient = matching_gradient(view, target, descent.free, torch.zeros(len(held)))
            descent.step(gradient * held[:, None, None, None, None], 0.0)
        return gist(descent.free, images.counts().to(torch.float32))

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Pool the images of the classes that each client holds, and train on them."""
        return self.server.outcome(state.server.tensors, self.canvas, task, 1.0, rng)

    def _real(self, images: Images, task: Task, rng: torch.Generator) -> Tensor:
        """Return real images of every class, noise for one that is not held."""
        free = self.canvas.start(task, rng)
        side = self.canvas.tile(task)
        for c in range(len(task.classes)):
            rows = (images.labels == c).nonzero()[:, 0]
            if len(rows):
                order = torch.randperm(len(rows), generator=rng)
                chosen = rows[order[torch.arange(self.canvas.formed) % len(rows)]]
                free[c] = F.adaptive_avg_pool2d(images.floats(chosen), (side, side))
        return free
