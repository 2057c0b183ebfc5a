"""Compressors: what makes a small image of an image, learned or fixed, and classifies behind it."""

from fedgist.compress.classifier import CompressedNetwork
from fedgist.compress.learned import Compressor, build_compressor, dissimilarity, multiply_adds
from fedgist.compress.small import enlarge, quantised

__all__ = [
    "CompressedNetwork",
    "Compressor",
    "build_compressor",
    "dissimilarity",
    "enlarge",
    "multiply_adds",
    "quantised",
]
