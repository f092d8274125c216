"""Networks in 8 bits: calibrated copies, and integer layers whose bytes are the same everywhere."""

from sparseconv.backends.integers import Rescale
from sparseconv.quantization.calibration import quantize
from sparseconv.quantization.layers import convolve
from sparseconv.quantization.network import QuantizedNetwork

__all__ = ["QuantizedNetwork", "Rescale", "convolve", "quantize"]
