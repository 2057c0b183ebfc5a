"""Compressors: what makes a small image of an image, learned or fixed, and classifies behind it."""

from fedgist.compress.classifier import CompressedNetwork
from fedgist.compress.learned import (
    Compressor,
    build_compressor,
    dissimilarity,
    load_compressor,
    multiply_adds,
)
from fedgist.compress.small import as_uint8, enlarge, quantised

__all__ = [
    "CompressedNetwork",
    "Compressor",
    "as_uint8",
    "build_compressor",
    "dissimilarity",
    "enlarge",
    "load_compressor",
    "multiply_adds",
    "quantised",
]
