"""What a server can rebuild of the images behind small uploads: attacks on a public compressor.

An upload is an image of y x y pixels that a public compressor V made from a private one of S x S.
The server knows V and sees every upload with its label. Images are float32 ``[b, c, h, w]`` in
[0, 1]. All attacks are lower bounds: they show what leaks, never that nothing else does.

1. `moia`: gradient descent on the image until V maps it to the upload, the attack that FedSumUp is
   judged by.
2. `train_decoder`: a network learns V's inverse from images of its own. A low similarity of the
   upload itself protects nothing against it: V(x) = 1 - x reads a low SSIM and is undone exactly.
3. `identified`: which of some known images an upload was made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.audit.decoder import mean_images, train_decoder
from fedgist.audit.similarity import Compress, Distance, Similarity, identified, similarity
from fedgist.compress import enlarge, quantised
from fedgist.errors import DataError
from fedgist.types import BATCH, Images

__all__ = ["Attack", "headline", "invert", "moia", "rows"]


@dataclass(frozen=True)
class Attack:
    """What the pictures of one adversary, who ``sees`` so much, share with the originals."""

    name: str
    sees: str
    similarity: Similarity


def moia(
    compress: Compress,
    uploads: Tensor,
    size: int,
    steps: int = 500,
    lr: float = 0.1,
    tv: float = 0.001,
) -> Tensor:
    """Descend on images until their compression is the upload.

    FedSumUp names start, optimiser, rate, steps and weight; the objective is our reading of it:

        min_x  mean_pixels (V(x) - upload)² + tv · TV(x)

    with TV(x) the mean over pixels of |x's step to the right| + |its step down|. Adam starts at
    the upsampled upload; x is clamped to [0, 1] after every step.

    Args:
        compress: V, differentiable; row i of its output depends on row i of its input only.
        uploads: ``[b, c, y, y]``.
        size: S.
        steps: of Adam.
        lr: its learning rate.
        tv: weight of the total variation.

    Returns:
        float32 ``[b, c, size, size]`` in [0, 1].
    """
    out = []
    for part in torch.split(uploads, BATCH):
        x = enlarge(part, size).detach().clone().requires_grad_()
        adam = torch.optim.Adam([x], lr)
        for _ in range(steps):
            # a sum over images: each descends as if it were alone
            fit = (compress(x) - part).square().mean((1, 2, 3)).sum()
            right = (x[..., 1:] - x[..., :-1]).abs().mean((1, 2, 3)).sum()
            down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean((1, 2, 3)).sum()
            (x.grad,) = torch.autograd.grad(fit + tv * (right + down), [x])
            adam.step()
            with torch.no_grad():
                x.clamp_(0, 1)
        out.append(x.detach())
    return torch.cat(out)


def rows(attacks: Sequence[Attack]) -> list[dict[str, Any]]:
    """Return one plain dict for each attack: name, sees, psnr, ssim, distance, worst, n."""
    return [{"name": a.name, "sees": a.sees} | asdict(a.similarity) for a in attacks]


def headline(upload: Attack, attacks: Sequence[Attack]) -> str:
    """Say in one sentence which of the attacks, or the upload as it is, shows most."""

    def told(a: Attack) -> str:
        return f"PSNR {a.similarity.psnr:.1f} dB, SSIM {a.similarity.ssim:.2f}"

    every = [upload, *attacks]  # the upload wins a tie
    by_psnr = max(every, key=lambda a: a.similarity.psnr)
    by_ssim = max(every, key=lambda a: a.similarity.ssim)
    if by_psnr is by_ssim is upload:
        return f"No attack shows more than the upload as it is: {told(upload)}."
    most = f"Most is recovered by the attack '{by_psnr.name}' ({told(by_psnr)})"
    if by_psnr is not by_ssim:
        most = f"{most} by PSNR, by '{by_ssim.name}' ({told(by_ssim)}) by SSIM"
    return f"{most}; the upload as it is shows {told(upload)}."


def invert(
    originals: Tensor,
    labels: Tensor,
    compressors: Sequence[Compress],
    uploads: Sequence[Tensor],
    auxiliary: Images,
    perceptual: Distance,
    rng: torch.Generator,
    *,
    differentiable: bool = True,
    fresh: bool = False,
    moia_steps: int = 500,
    decoder_steps: int = 1500,
) -> dict[str, Any]:
    """Run every attack on the uploads of the last round.

    Args:
        originals: float32 ``[n, c, S, S]`` in [0, 1], used to judge only.
        labels: int64 ``[n]``, which the server sees.
        compressors: V of each round; the last made the last uploads.
        uploads: float ``[n, c, y, y]`` in [0, 1] of each round; row i is the same image in all.
        auxiliary: the attacker's own images, none of them an original.
        perceptual: of the column ``distance``.
        rng: of the decoders.
        differentiable: False leaves `moia` out.
        fresh: the compressors draw at random; see `train_decoder`.
        moia_steps: of `moia`.
        decoder_steps: of `train_decoder`.

    Returns:
        ``rows`` (references first, then attacks), ``headline``, ``distance`` (its name),
        ``identified`` (by ``pixels``, ``white box``, by ``chance``, and the size of the
        ``gallery``: originals and auxiliary images) and ``pictures`` (name -> float32
        ``[n, c, S, S]``).

    Raises:
        DataError: shapes or numbers that do not fit.
    """
    sizes = [len(x) for x in (originals, labels, *uploads)]
    if not uploads or len(compressors) != len(uploads) or len(set(sizes)) > 1:
        raise DataError(
            "originals, labels and uploads must be as many, with a compressor for each round. "
            f"Got {sizes}, and {len(compressors)} compressors for {len(uploads)} rounds"
        )
    size, y = originals.shape[-1], uploads[-1].shape[-1]

    def decoded(through: Sequence[Compress], seen: Sequence[Tensor]) -> Tensor:
        trained = train_decoder(through, auxiliary, rng, decoder_steps, labelled=True, fresh=fresh)
        return trained(seen, labels)

    guess = mean_images(auxiliary, len(auxiliary.classes))[labels]
    small = quantised(F.interpolate(originals, (y, y), mode="bicubic", antialias=True))
    shown = {
        "class mean": ("the label only, no upload", guess),
        "bicubic": (f"the original shrunk to {y} x {y}", enlarge(small, size)),
        "upload": ("the upload, upsampled", enlarge(uploads[-1], size)),
    }
    references = len(shown) - 1
    if differentiable:
        rebuilt = moia(compressors[-1], uploads[-1], size, moia_steps)
        shown["MoIA"] = ("the upload and its compressor", rebuilt)
    sees = "the upload, its label, its compressor and images of its own"
    shown["decoder"] = (sees, decoded(compressors[-1:], uploads[-1:]))
    if len(compressors) > 1:
        sees = "the upload, its label, the compressor of one round before and images of its own"
        shown["decoder, one round old"] = (sees, decoded(compressors[-2:-1], uploads[-1:]))
        sees = "the uploads of all rounds, the label, all compressors and images of its own"
        shown["decoder, all rounds"] = (sees, decoded(compressors, uploads))
    found = [Attack(k, w, similarity(originals, x, perceptual)) for k, (w, x) in shown.items()]
    gallery, truth = torch.cat([originals, auxiliary.floats()]), torch.arange(len(originals))
    return {
        "rows": rows(found),
        "headline": headline(found[references], found[references + 1 :]),
        "distance": perceptual.name,
        "identified": {
            "pixels": identified(uploads[-1], gallery, truth),
            "white box": identified(uploads[-1], gallery, truth, compressors[-1]),
            "chance": 1 / len(gallery),
            "gallery": len(gallery),
        },
        "pictures": {name: x for name, (_, x) in shown.items()},
    }
