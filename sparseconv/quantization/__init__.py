"""Networks in 8 bits: calibrated copies, and integer layers whose bytes are the same everywhere."""

from sparseconv.backends.integers import Rescale
from sparseconv.quantization.layers import convolve
from sparseconv.quantization.network import QuantizedNetwork
from sparseconv.quantization.quantize import quantize

__all__ = ["QuantizedNetwork", "Rescale", "convolve", "quantize"]
