"""Scenes that are larger than the device's memory, block by block."""

from sparseconv.streaming.store import Part
from sparseconv.streaming.streamed import stream

__all__ = ["Part", "stream"]
