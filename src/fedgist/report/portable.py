"""Classifiers for programs without FedGist: ONNX and torch.export, checked against the original.

Both files hold one function: float32 ``[batch, channels, size, size]`` in [0, 1] to
log-probabilities ``[batch, classes]``, any batch. They contain all that the classifier needs, its
encoder included.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.compress import CompressedNetwork
from fedgist.encoders.base import INTEGERS, prepare
from fedgist.errors import ConfigError, DataError, FedGistError, MissingExtra
from fedgist.heads.linear import CodeClassifier, whitening_of
from fedgist.train import Network
from fedgist.types import Classifier
from fedgist.whole import write_whole

__all__ = ["LIMIT", "as_module", "difference", "probes", "write_onnx", "write_torch"]

LIMIT = 1e-4  # largest difference of a log-probability: far below what changes a decision
TRACED = 2  # images of the batch that is traced; the check takes more
CHECKED = 16
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

Run = Callable[[Tensor], Tensor]


def as_module(classifier: Classifier) -> nn.Module:
    """Return a classifier as one module: the same arithmetic, without batches and checks.

    Raises:
        ConfigError: a kind of classifier that is not known here.
    """
    if isinstance(classifier, Network):
        return _Logs(classifier)
    if isinstance(classifier, CompressedNetwork):
        return _Compressed(classifier)
    if isinstance(classifier, CodeClassifier):
        return _Codes(classifier)
    raise ConfigError(
        f"a classifier to export must be network, compressed or closed-form. Got "
        f"'{classifier.kind}': use its safetensors file with fedgist.load_classifier"
    )


def probes(channels: int, size: int) -> Tensor:
    """Return float32 ``[16, channels, size, size]`` of 8-bit values: noise and smooth images."""
    rng = torch.Generator().manual_seed(0)
    half = CHECKED // 2
    noise = torch.rand(half, channels, size, size, generator=rng)
    smooth = torch.rand(half, channels, 5, 5, generator=rng)
    smooth = F.interpolate(smooth, (size, size), mode="bilinear", align_corners=False)
    return (torch.cat([noise, smooth]) * 255).round() / 255


def write_torch(classifier: Classifier, path: Path, channels: int, size: int) -> float:
    """Write a classifier as a torch.export archive, put in place when complete and checked.

    Returns:
        The largest difference of a log-probability on `probes`, read back from the archive.

    Raises:
        ConfigError: it cannot be expressed so, or the file cannot be written.
        DataError: the archive gives other results than the classifier, by more than `LIMIT`.
    """
    x = probes(channels, size)
    wanted = classifier.predict(x)
    with _quiet(classifier, "torch.export"):
        buffer = io.BytesIO()
        torch.export.save(_traced(classifier, x), buffer)
        data = buffer.getvalue()
        again = torch.export.load(io.BytesIO(data)).module()  # our own bytes, just written
        got = again(x)
    found = _checked(difference(wanted, got), classifier, "torch.export")
    write_whole(path, data)
    return found


def write_onnx(classifier: Classifier, path: Path, channels: int, size: int) -> float:
    """Write a classifier as an ONNX model; otherwise as `write_torch`.

    Raises:
        MissingExtra: the packages of the extra ``onnx`` are not installed.
    """
    for package in ONNX_PACKAGES:
        if find_spec(package) is None:
            raise MissingExtra(package, "onnx")
    import onnxruntime

    x = probes(channels, size)
    wanted = classifier.predict(x)
    with _quiet(classifier, "ONNX"):
        program = torch.onnx.export(
            _traced(classifier, x),
            input_names=["images"],
            output_names=["log_probabilities"],
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        data = program.model_proto.SerializeToString()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    found = _checked(difference(wanted, torch.from_numpy(np.asarray(got))), classifier, "ONNX")
    write_whole(path, data)
    return found


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors; equal infinities differ by 0, NaN by inf."""
    if a.shape != b.shape:
        return float("inf")
    gap = torch.where(a == b, 0.0, (a.to(torch.float64) - b.to(torch.float64)).abs())
    return float(gap.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _traced(classifier: Classifier, x: Tensor) -> torch.export.ExportedProgram:
    module = as_module(classifier).eval()
    with torch.no_grad():
        module(x[:TRACED])  # fills what encoders keep: no tensor of the trace may stay in there
        batch = {0: torch.export.Dim("batch", min=1)}
        return torch.export.export(module, (x[:TRACED],), dynamic_shapes=(batch,))


def _checked(found: float, classifier: Classifier, what: str) -> float:
    if not found <= LIMIT:
        raise DataError(
            f"the {what} file must agree with classifier '{classifier.kind}' to {LIMIT:g}. Got a "
            f"difference of {found:.3g}: it is not written; use the safetensors file"
        )
    return found


@contextmanager
def _quiet(classifier: Classifier, what: str) -> Iterator[None]:
    """Silence exporters; whatever they raise becomes one line."""
    loud = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FedGistError:
        raise
    except Exception as e:  # exporters raise whatever their compilers raise
        line = next((t for t in str(e).splitlines() if t.strip()), "")
        raise ConfigError(
            f"a classifier to export as {what} must be made of operations that it has. Got "
            f"'{classifier.kind}' ({type(e).__name__}: {line:.160}): use the safetensors file"
        ) from e
    finally:
        logging.disable(loud)


class _Logs(nn.Module):
    """`Network.predict` as one function."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.model = network.model
        self.register_buffer("mean", network.mean[:, None, None])
        self.register_buffer("std", network.std[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model((x - self.mean) / self.std)
        return logits.log_softmax(1)


class _Compressed(nn.Module):
    """`CompressedNetwork.predict` as one function."""

    def __init__(self, classifier: CompressedNetwork) -> None:
        super().__init__()
        self.logs = _Logs(classifier.network)
        self.classifier = classifier
        if isinstance(classifier.compress, nn.Module):
            self.compress = classifier.compress

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logs(self.classifier.seen(x))
        return out


class _Codes(nn.Module):
    """`CodeClassifier.predict` as one function: `Whitening.forward` without its branch."""

    def __init__(self, classifier: CodeClassifier) -> None:
        super().__init__()
        self.classifier = classifier
        space = classifier.space
        self.white: Any = whitening_of(space.encoder, space.whitening)

    def forward(self, x: Tensor) -> Tensor:
        space = self.classifier.space
        z = self._whitened(space.encoder.encode(prepare(x, space.encoder.size)))
        norm = (z * z).sum(1, keepdim=True).sqrt()
        if space.normalise:
            z = z * (space.clip / norm.clamp(min=1e-12))
            norm = (z * z).sum(1, keepdim=True).sqrt()
        return self.classifier.scores(z * (space.clip / norm.clamp(min=space.clip)))

    def _whitened(self, z: Tensor) -> Tensor:
        white = self.white
        k = ((z - white._mean) * white._grid).round()
        size = (k * k).sum(1, keepdim=True)
        inside = (k * ((INTEGERS - k.shape[1]) / size.sqrt().clamp(min=1))).trunc()
        k = torch.where(size > INTEGERS**2, inside, k)
        out: Tensor = (k @ white._integers) * white._unit
        return out
