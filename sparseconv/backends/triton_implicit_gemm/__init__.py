"""Sparse convolution as an implicit matrix product in Triton. Importing this package loads no Triton."""

from __future__ import annotations
