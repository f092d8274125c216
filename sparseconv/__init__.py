"""Sparse convolution with plan objects: plan once, execute many times."""

__version__ = "0.1.0"
