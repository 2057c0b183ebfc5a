"""Images from any common layout, and how a simulation deals them out."""

from fedgist.data.images import Encoded, convert, decode, stack
from fedgist.data.partition import SPECS, Partition, partition
from fedgist.data.sources import Records, Source, open_source

__all__ = [
    "SPECS",
    "Encoded",
    "Partition",
    "Records",
    "Source",
    "convert",
    "decode",
    "open_source",
    "partition",
    "stack",
]
